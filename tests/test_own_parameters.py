"""Parameters of the LightningModule itself, among them those that FSDP2 refuses to shard (0-dim)."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

from tests.collectives import count_collectives
from tests.ranks import run_on_ranks
from tests.strategy_models import (
    PARTS,
    Toy,
    all_sharded,
    apart,
    build,
    chunked,
    dataset,
    fit,
    gradients,
    loader,
    parameters,
    train_plainly,
    trainer_of,
    whole_batches,
)

CLOSE = 2e-6


def reduces_of(module, strategy=None, **options):
    """All-reduces of a fit beyond those that Lightning runs for any module."""
    strategy = strategy or {}
    with count_collectives() as usual:
        fit(build(), chunked(**strategy), **options)
    with count_collectives() as counted:
        fit(module, chunked(**strategy), **options)
    return counted.all_reduces - usual.all_reduces


class Owning(Toy):
    """A (3, 3) and two 0-dim parameters of its own, one deep in a block, one that only some steps use."""

    def __init__(self):
        super().__init__()
        self.mixer = nn.Parameter(torch.eye(3) + 0.1 * torch.randn(3, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.seldom = nn.Parameter(torch.tensor(0.5))
        self.model.layers[1].up.register_parameter("gate", nn.Parameter(torch.tensor(0.7)))
        self.model.layers[1].register_forward_hook(lambda block, _args, out: out * block.up.gate)

    def loss(self, batch, seldom=False):
        x, y = batch
        prediction = self.scale * (self.mixer @ self.model(x))
        if seldom:
            prediction = prediction * self.seldom
        return (prediction - y).square().mean()


class Gated(Owning):
    """The 0-dim parameter of the block is used inside the block."""

    def __init__(self):
        super().__init__()
        self.model.layers[1]._forward_hooks.clear()
        self.model.layers[1].up.register_forward_hook(lambda up, _args, out: out * up.gate)


def own_parameters(kind, clip):
    module, plain = build(kind), train_plainly(build(kind), epochs=2, clip=clip)
    unclipped = train_plainly(build(kind), epochs=2)
    # One for each step, for all 0-dim parameters; the norm is reduced for any module.
    assert reduces_of(module, max_epochs=2, gradient_clip_val=clip) == 6
    if clip is None:
        assert max(map(apart, module.seen, plain.seen)) < 1e-6
    else:
        assert apart(parameters(unclipped), parameters(plain)) > 1e-4, "clipping did nothing"
    assert apart(parameters(module), parameters(plain)) < CLOSE
    report = module.reports[-1]
    assert (report.all_gathers, report.reduce_scatters, report.chunks) == (7, 4, 12)
    assert (
        report.offloaded_bytes == report.reloaded_bytes == (3 * 4 - 1) * 3 * 8 * 4
    )  # the chunk that backward needs first stays
    assert isinstance(module.mixer, DTensor)
    assert not isinstance(module.scale, DTensor)
    assert abs(module.scale.item() - 1.5) > 1e-3
    return {name: p.item() for name, p in module.named_parameters() if p.ndim == 0}


def by_value():
    """Clipping by value needs no norm."""
    module, plain = build(Owning), build(Owning)
    fit(module, gradient_clip_val=0.01, gradient_clip_algorithm="value")
    optimizer = plain.configure_optimizers()
    for batch in whole_batches():
        optimizer.zero_grad()
        plain.loss(batch).backward()
        nn.utils.clip_grad_value_(plain.parameters(), 0.01)
        optimizer.step()
    assert apart(parameters(module), parameters(plain)) < CLOSE


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("kind", [Owning, Gated])
def test_own_parameters_train_as_in_one_process(kind, clip):
    first, second = run_on_ranks(2, own_parameters, kind, clip)
    assert first == second
    assert len(first) == 3


def test_clipping_by_value():
    run_on_ranks(2, by_value)


class Apart(Owning):
    """Each rank starts its 0-dim parameters elsewhere."""

    def __init__(self):
        super().__init__()
        if dist.get_rank():
            self.scale.data.fill_(7.0)
            self.model.layers[1].up.gate.data.fill_(-3.0)


def initial_values():
    module = build(Apart)
    trainer = trainer_of(chunked(), limit_val_batches=1)
    trainer.validate(module, loader(), verbose=False)
    seen = module.scale.item(), module.model.layers[1].up.gate.item()
    trainer.fit(module, loader())
    assert apart(parameters(module), parameters(train_plainly(build(Owning)))) < CLOSE
    return seen


def test_ranks_start_from_the_values_of_the_first():
    assert run_on_ranks(2, initial_values) == [(1.5, pytest.approx(0.7))] * 2


class SeldomUsed(Owning):
    """Only the second rank uses ``seldom``, and only in the second step; nobody does in the third."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch, seldom=batch_idx == 1 and dist.get_rank() == 1)


def unused_somewhere():
    module = build(SeldomUsed)
    assert reduces_of(module) == 3
    assert [("seldom" in seen) for seen in module.seen] == [False, True, False]

    # One process: the mean of the ranks' losses, each over its own half of the samples.
    plain = build(SeldomUsed)
    optimizer = plain.configure_optimizers()
    halves = [list(_loader_of(rank)) for rank in range(2)]
    for step in range(3):
        optimizer.zero_grad()
        losses = [plain.loss(halves[rank][step], seldom=step == 1 and rank == 1) for rank in range(2)]
        (sum(losses) / 2).backward()
        assert apart(module.seen[step], gradients(plain)) < 1e-6, step
        optimizer.step()
    assert apart(parameters(module), parameters(plain)) < CLOSE
    return module.seldom.item()


def _loader_of(rank):
    data = dataset()
    sampler = DistributedSampler(data, 2, rank, shuffle=False)
    return DataLoader(data, batch_size=PARTS, sampler=sampler)


def test_a_parameter_that_only_one_rank_used():
    first, second = run_on_ranks(2, unused_somewhere)
    assert first == second
    assert first != 0.5


class Frozen(Owning):
    def __init__(self):
        super().__init__()
        self.scale.requires_grad_(False)
        self.model.embed.requires_grad_(False)
        self.model.layers[1].up.gate.requires_grad_(False)


def frozen():
    module = build(Frozen)
    assert reduces_of(module) == 3  # for ``seldom``, which needs a gradient
    assert module.scale.item() == 1.5
    assert apart(parameters(module), parameters(train_plainly(build(Frozen)))) < CLOSE


class OwningAndSharding(Owning):
    """fully_shard calls of its own leave 0-dim parameters out, as FSDP2 demands."""

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        whole = {p for p in self.parameters() if p.ndim == 0}
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh, ignored_params=whole)
        fully_shard(self.model, mesh=mesh, ignored_params=whole)


def owning_and_sharding():
    module = build(OwningAndSharding)
    fit(module, gradient_clip_val=0.05)
    assert all_sharded(module)
    assert apart(parameters(module), parameters(train_plainly(build(Owning), clip=0.05))) < CLOSE
    # The group of self.model, and the LightningModule's own for ``mixer``.
    assert [(r.all_gathers, r.reduce_scatters) for r in module.reports] == [(8, 5)] * 3


def accumulated_without_chunks():
    module, plain = build(Owning), build(Owning)
    strategy = {"enable_chunk_mbs": False}
    assert (
        reduces_of(module, strategy, accumulate_grad_batches=3, max_epochs=2) == 2
    )  # one for each step, not for each micro-batch
    optimizer = plain.configure_optimizers()
    for _ in range(2):
        optimizer.zero_grad()
        for batch in whole_batches():
            (plain.loss(batch) / 3).backward()
        optimizer.step()
    assert len(module.seen) == 2
    assert apart(parameters(module), parameters(plain)) < CLOSE


@pytest.mark.parametrize("check", [frozen, owning_and_sharding, accumulated_without_chunks])
def test_own_parameters_that_are(check):
    run_on_ranks(2, check)
