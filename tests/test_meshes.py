"""Four processes in two dimensions: replicas of a sharded model, and tensor parallelism beside sharding."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.mesh_models import (
    CLIP,
    WORLD,
    Meshed,
    Scaled,
    data_of,
    own_data,
    ranks_with_data,
    strategy_of,
    train_plainly,
    values,
)
from tests.models import Loader, chunked, fit, make_trainer
from tests.one_window import accumulate, assert_close, build, micro_batches, train_window
from tests.ranks import count_collectives, raises_on_ranks, run_on_ranks
from tests.structure_models import Images

MESHES = ["replicas", "tensor parallel"]


def assert_same_everywhere(module):
    everyone = [None] * WORLD
    dist.all_gather_object(everyone, values(module))
    for other in everyone[1:]:
        assert_close(other, everyone[0], 0)


def windows(mesh):
    expected, _ = accumulate(build(Scaled), data_of(mesh))
    for precision, passes, tolerance in [("32-true", 1, 1e-6), ("bf16-mixed", 1, 2e-2), ("32-true", 2, 1e-6)]:
        module = Meshed()
        with count_collectives() as module.counted:
            strategy = strategy_of(mesh, chunkmbs_plan={"max_lockstep": 4 // passes})
            train_window(module, own_data(mesh), strategy, precision=precision)
        assert (module.report.all_gathers, module.report.reduce_scatters) == (7 * passes, 4 * passes)
        assert (module.counted.all_gathers, module.counted.reduce_scatters) == (7 * passes, 4 * passes)
        # One for each group in a pass or (on the host) for each micro-batch, one for parameters held whole, and (on the
        # host) one in a pass for what no rank has used, and one for each micro-batch of a loader with its own length.
        before, after = module.all_reduces
        assert after - before == (4 * passes if mesh == "replicas" else 4) + 1 + passes + 4
        assert module.report.chunks > 4 * 3
        assert_close(module.gradients, expected, tolerance)
        assert_same_everywhere(module)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_window_equals_one_process(mesh):
    run_on_ranks(WORLD, windows, mesh)


def clipped(mesh):
    data = data_of(mesh)
    for n, epochs in ((4, 2), (1, 1)):
        net, module = build(Scaled), Meshed()
        norms = train_plainly(net, data, n, epochs)
        options = {"accumulate_grad_batches": n, "max_epochs": epochs, "gradient_clip_val": CLIP}
        trainer = fit(module, own_data(mesh), strategy_of(mesh), **options)
        assert min(norms) > 2 * CLIP
        assert module.norms == pytest.approx(norms, rel=1e-4)
        assert_close(values(module), {name: p.detach() for name, p in net.named_parameters()}, 2e-6)
        sampler = trainer.strategy.distributed_sampler_kwargs
        ranks = ranks_with_data(mesh)
        assert sampler == {"num_replicas": ranks, "rank": dist.get_rank() // (WORLD // ranks)}


@pytest.mark.parametrize("mesh", MESHES)
def test_clipping_in_lockstep_and_while_cutting_equals_one_process(mesh):
    run_on_ranks(WORLD, clipped, mesh)


def resumed(mesh, folder):
    data, options, whole = own_data(mesh)[:2], {"accumulate_grad_batches": 2}, Meshed()
    fit(whole, data, strategy_of(mesh), max_epochs=2, **options)
    for distributed in (True, False):
        path = Path(folder, f"{distributed}.ckpt")
        first, second = Meshed(), Meshed()
        strategy = strategy_of(mesh, save_distributed_checkpoint=distributed)
        fit(first, data, strategy, **options).save_checkpoint(path)
        assert path.is_dir() == distributed
        dist.barrier()
        strategy = strategy_of(mesh, save_distributed_checkpoint=distributed)
        trainer = make_trainer(strategy, max_epochs=2, **options)
        trainer.fit(second, Loader(data), ckpt_path=str(path))
        assert (trainer.global_step, len(second.norms)) == (2, 1)
        assert_close(values(second), values(whole), 0)
        assert_same_everywhere(second)
        if not distributed:
            Meshed().load_state_dict(torch.load(path, weights_only=True)["state_dict"], strict=True)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_resumed_run_equals_the_uninterrupted_one(mesh, tmp_path):
    run_on_ranks(WORLD, resumed, mesh, str(tmp_path))


def towers(mesh):
    """Only some micro-batches of some ranks need the first stack."""
    net, module = build(Images), Meshed(build(Images))
    plan = {"apply_modules": ["net.tower.{*}", "net.layers.{*}"]}
    train_window(module, own_data(mesh), strategy_of(mesh, chunkmbs_plan=plan))
    assert module.trainer.strategy._applied.agree is not None
    assert_close(module.gradients, accumulate(net, data_of(mesh))[0])


@pytest.mark.parametrize("mesh", MESHES)
def test_blocks_that_only_some_ranks_need(mesh):
    run_on_ranks(WORLD, towers, mesh)


class Writing(Meshed):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.net.head.weight *= 2
        return super().training_step(batch, batch_idx)


def written(mesh):
    net, module = build(Scaled), Writing()
    with torch.no_grad():
        net.head.weight *= 4
    train_plainly(net, [batches[:2] for batches in data_of(mesh)], 2, 1)
    fit(module, own_data(mesh)[:2], strategy_of(mesh), accumulate_grad_batches=2, gradient_clip_val=CLIP)
    return (values(module)["head.weight"] - net.head.weight).abs().max().item()


@pytest.mark.parametrize("mesh", MESHES)
def test_what_a_step_writes_reaches_the_shards(mesh):
    assert max(run_on_ranks(WORLD, written, mesh)) < 2e-6


def own_batches(sizes):
    """Ranks of a tensor-parallel group draw their own batches."""
    strategy = strategy_of("tensor parallel")
    fit(Meshed(), micro_batches(sizes[dist.get_rank()], seed=dist.get_rank() * (sizes[0] == sizes[1])), strategy)


@pytest.mark.parametrize("sizes", [[[2]] * 4, [[2, 2], [2, 3], [2, 2], [2, 3]]], ids=["values", "later sizes"])
def test_ranks_that_share_layers_must_share_batches(sizes):
    for error, message in raises_on_ranks(WORLD, own_batches, sizes):
        assert error == "ValueError"
        assert "theirs differ in this step" in message


class Validated(Meshed):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.losses[batch_idx] = self.net(batch).item()


def own_validation_batches(own):
    """Loaders for validation; in the second one each rank has batches of its own where ``own`` is set."""
    alike, second = micro_batches([2, 3]), micro_batches([2, 3], seed=dist.get_rank() * own)
    trainer = make_trainer(strategy_of("tensor parallel"), accumulate_grad_batches=2)
    trainer.fit(Validated(), Loader(alike), [Loader(alike), Loader(second)])
    return trainer.global_step


def test_every_loader_must_give_ranks_that_share_layers_the_same_batches():
    assert run_on_ranks(WORLD, own_validation_batches, False) == [1] * WORLD
    for error, message in raises_on_ranks(WORLD, own_validation_batches, True):
        assert error == "ValueError"
        assert "theirs differ in this step" in message


class LaterValues(Loader):
    """Yields the same batches on all ranks in the first epoch, and each rank's own in the second."""

    def __init__(self, trainer):
        super().__init__(micro_batches([2, 2], [6]))
        self.trainer = trainer

    def __iter__(self):
        later = self.trainer.current_epoch > 0
        return iter(micro_batches([2, 2], [6], seed=dist.get_rank()) if later else self.data)


def own_batches_later():
    trainer = make_trainer(strategy_of("tensor parallel"), max_epochs=2)
    try:
        trainer.fit(Meshed(), LaterValues(trainer))
    finally:
        assert trainer.global_step == 2, "the first epoch is over"


def test_ranks_that_share_layers_must_share_batches_in_later_epochs_too():
    for error, message in raises_on_ranks(WORLD, own_batches_later):
        assert error == "ValueError"
        assert "theirs differ in this step" in message


def sizes_that_do_not_fit(size):
    fit(Meshed(), own_data("replicas"), chunked(2, fsdp_plan={"replicate_size": size}))


def test_replicas_must_divide_the_data_parallel_size():
    for error, message in raises_on_ranks(WORLD, sizes_that_do_not_fit, 3):
        assert error == "ValueError"
        assert "replicate_size must divide data_parallel_size" in message
        assert "it is 3, and data_parallel_size is 4" in message


def one_rank_stays_away():
    strategy = strategy_of("replicas", timeout=timedelta(seconds=3))
    fit(Meshed(), own_data("replicas"), strategy)
    for part in ("shard", "replicate"):
        group = strategy._meshes.shard[part].get_group()
        if dist.get_rank(group) == 0:
            with pytest.raises(RuntimeError, match=r"(?i)timeout|timed out"):
                dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()  # the group of all ranks is the tests' own and keeps its timeout


def test_collectives_within_a_replica_and_between_replicas_have_the_timeout_of_the_strategy():
    run_on_ranks(WORLD, one_rank_stays_away)
