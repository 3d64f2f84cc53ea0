"""Runs that resume: on other numbers of ranks, under the stock strategy, with optimizers of little or no state."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from tests.ranks import raises_on_ranks, run_on_ranks
from tests.strategy_models import (
    Sharding,
    Toy,
    apart,
    build,
    chunked,
    fit,
    loader,
    parameters,
    stock,
    trainer_of,
)

FORMATS = pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "whole"])
CLOSE = 1e-6
WINDOW = 8  # samples of an optimizer step, whatever the number of ranks


class Loading(Toy):
    """Records what it was given when training starts."""

    def on_train_start(self):
        self.first = parameters(self), moments(self, self.trainer.optimizers[0])


class Frozen(Loading):
    """Some parameters frozen, one never used, decay for some: three kinds that differ in what state they have."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(3, 3)
        self.model.embed.requires_grad_(False)
        self.model.layers[1].up.requires_grad_(False)

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in reversed(list(self.parameters())) if p.ndim < 2]
        groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}]
        return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


class Stateless(Loading):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class StockLoading(Loading, Sharding):
    pass


def moments(module, optimizer):
    """Every tensor of the optimizer's state, by the parameter's name; of parameters that have some."""
    optimizer = getattr(optimizer, "_optimizer", optimizer)
    if not optimizer.state:
        return {}
    options = StateDictOptions(full_state_dict=True, strict=False)
    state = get_optimizer_state_dict(module, optimizer, options=options)["state"]
    gathered = {f"{name} {key}": value.clone() for name, values in state.items() for key, value in values.items()}
    whole = [gathered]
    dist.broadcast_object_list(whole)  # full state dicts are the first rank's
    return whole[0]


def run(kind, strategy, **options):
    module = build(kind)
    batches = WINDOW // dist.get_world_size() // 2
    trainer = fit(module, strategy, loader(batch=batches), accumulate_grad_batches=2, **options)
    return module, trainer


def saved(kind, sharded, path, epochs=2, own=True):
    strategy = chunked(save_distributed_checkpoint=sharded) if own else stock()
    strategy._save_distributed_checkpoint = sharded
    module, trainer = run(kind, strategy, max_epochs=epochs)
    state = parameters(module), moments(module, trainer.optimizers[0])
    trainer.save_checkpoint(path)
    return state


def continued(kind, path, expected=None, own=True, epochs=3):
    """Continue to the end of the next epoch; bitwise from what was saved."""
    torch.manual_seed(5)
    module = kind()
    trainer = trainer_of(chunked() if own else stock(), max_epochs=epochs, accumulate_grad_batches=2)
    batches = WINDOW // dist.get_world_size() // 2
    trainer.fit(module, loader(batch=batches), ckpt_path=path)
    if own:
        assert module.reports[-1].chunks == 3 * WINDOW // dist.get_world_size()
    if expected is not None:
        for found, wanted in zip(module.first, expected, strict=True):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    return parameters(module)


def uninterrupted(kind, own=True, epochs=3):
    return parameters(run(kind, chunked() if own else stock(), max_epochs=epochs)[0])


@FORMATS
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_on_another_number_of_ranks(before, after, sharded, tmp_path):
    path = str(tmp_path / "some.ckpt")
    state = run_on_ranks(before, saved, Loading, sharded, path)[0]
    assert len(state[1]) == 3 * len(state[0])
    found = run_on_ranks(after, continued, Loading, path, state)[0]
    assert apart(found, run_on_ranks(before, uninterrupted, Loading)[0]) < CLOSE


@FORMATS
@pytest.mark.parametrize("kind", [Frozen, Stateless])
def test_parameters_without_state(kind, sharded, tmp_path):
    path = str(tmp_path / "some.ckpt")
    state = run_on_ranks(2, saved, kind, sharded, path)[0]
    assert not [name for name in state[1] if "unused" in name or "embed" in name]
    assert bool(state[1]) == (kind is Frozen)
    found = run_on_ranks(2, continued, kind, path, state)[0]
    assert apart(found, run_on_ranks(2, uninterrupted, kind)[0]) == 0


@FORMATS
@pytest.mark.parametrize("own", [True, False], ids=["ours to stock", "stock to ours"])
def test_checkpoints_of_the_stock_strategy(own, sharded, tmp_path):
    path = str(tmp_path / "some.ckpt")
    kinds = (Loading, StockLoading) if own else (StockLoading, Loading)
    state = run_on_ranks(2, saved, kinds[0], sharded, path, 2, own)[0]
    found = run_on_ranks(2, continued, kinds[1], path, state, not own)[0]
    assert apart(found, run_on_ranks(2, uninterrupted, kinds[0], own)[0]) < CLOSE


def from_an_optimizer_itself(path):
    """A checkpoint of a strategy that does not shard, whose optimizer numbers parameters along its groups."""
    module = build(Frozen)
    trainer = trainer_of("ddp", max_epochs=2, accumulate_grad_batches=2)
    trainer.strategy._ddp_kwargs["find_unused_parameters"] = True
    trainer.fit(module, loader(batch=2))
    trainer.save_checkpoint(path)
    names = {p: name for name, p in module.named_parameters()}
    state = trainer.optimizers[0].state
    return parameters(module), {f"{names[p]} {key}": v for p, values in state.items() for key, v in values.items()}


def test_a_checkpoint_of_ddp_with_groups_in_another_order(tmp_path):
    path = str(tmp_path / "ddp.ckpt")
    values, state = run_on_ranks(2, from_an_optimizer_itself, path)[0]
    run_on_ranks(2, continued, Frozen, path, (values, state))


def saved_before_the_first_step(sharded, folder):
    class Early(Toy):
        def on_train_start(self):
            self.trainer.save_checkpoint(Path(folder, "early.ckpt"))

    early, module = build(Early), build(Toy)
    fit(early, chunked(save_distributed_checkpoint=sharded))
    fit(module, chunked())
    assert apart(parameters(early), parameters(module)) == 0
    again = Toy()
    trainer_of(chunked()).fit(again, loader(), ckpt_path=str(Path(folder, "early.ckpt")))
    assert apart(parameters(again), parameters(module)) == 0


@FORMATS
def test_saving_before_the_first_step_changes_nothing(sharded, tmp_path):
    run_on_ranks(2, saved_before_the_first_step, sharded, str(tmp_path))


def resumed_in_bf16(sharded, folder):
    options = {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "enable_checkpointing": True}
    seen = []
    for path, epochs in ((None, 2), (str(Path(folder, "epoch=0.ckpt")), 2)):
        module = build(Loading)
        saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
        strategy = chunked(save_distributed_checkpoint=sharded)
        trainer = trainer_of(strategy, max_epochs=epochs, callbacks=[saving], **options)
        trainer.fit(module, loader(batch=2), ckpt_path=path)
        seen.append((parameters(module), moments(module, trainer.optimizers[0])))
    assert trainer.global_step == 6
    assert [apart(a, b) for a, b in zip(*seen, strict=True)] == [0, 0]
    assert len(module.seen) == 3


@FORMATS
def test_in_bf16(sharded, tmp_path):
    run_on_ranks(2, resumed_in_bf16, sharded, str(tmp_path))


class Smaller(Toy):
    def __init__(self):
        super().__init__()
        self.extra, self.model.norm = nn.Linear(2, 2), nn.Identity()


class Lenient(Smaller):
    strict_loading = False


def weights_alone(sharded, folder):
    path = Path(folder, "weights.ckpt")
    module, trainer = run(Toy, chunked(save_distributed_checkpoint=sharded))
    trainer.save_checkpoint(path, weights_only=True)
    trainer.test(module, loader(), verbose=False)
    assert apart(parameters(module), parameters(build(Toy))) > 0
    # Not an error where no optimizer is asked for, although the run has one.
    trainer.test(module, loader(), ckpt_path=str(path), weights_only=True, verbose=False)
    after = Path(folder, "after.ckpt")
    trainer.save_checkpoint(after)
    torch.manual_seed(3)
    for strategy_path in (path, after):
        other = Toy()
        trainer_of(chunked()).test(other, loader(), ckpt_path=str(strategy_path), weights_only=True, verbose=False)
        assert apart(parameters(other), parameters(module)) == 0
    lenient = Lenient()
    trainer_of(chunked()).test(lenient, loader(), ckpt_path=str(path), verbose=False)
    assert apart(parameters(lenient.model.embed), parameters(module.model.embed)) == 0


def misfit(kind, path):
    trainer = trainer_of(chunked())
    if kind is Toy:
        trainer.fit(Toy(), loader(), ckpt_path=path)
    else:
        trainer.test(kind(), loader(), ckpt_path=path, verbose=False)


@FORMATS
def test_weights_alone_and_other_models(sharded, tmp_path):
    run_on_ranks(2, weights_alone, sharded, str(tmp_path))
    path = str(tmp_path / "weights.ckpt")
    for name, message in raises_on_ranks(2, misfit, Toy, path):
        assert (name, "no state of optimizer 0" in message) == ("KeyError", True)
    for name, message in raises_on_ranks(2, misfit, Smaller, path):
        assert name == "RuntimeError"
        assert "lacks ['extra.bias', 'extra.weight'] (2 names) and has ['model.norm.bias'" in message
