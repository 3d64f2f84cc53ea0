"""Checkpoints of both formats, and runs that resume from them."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from tests.ranks import run_on_ranks
from tests.strategy_models import (
    Toy,
    all_sharded,
    apart,
    build,
    chunked,
    fit,
    loader,
    parameters,
    train_plainly,
    trainer_of,
)

CLOSE = 2e-6


class Scheduled(Toy):
    """A 0-dim parameter, a buffer, and a schedule that a resumed run must continue."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("steps", torch.zeros(()))

    def loss(self, batch):
        return self.scale * super().loss(batch)

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if self._trainer is None:
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def keys_of_state_dict():
    module, plain = build(), build()
    trainer_of(chunked()).fit(module, loader())
    train_plainly(plain)
    assert list(module.state_dict()) == list(plain.state_dict())
    whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    assert list(whole) == list(plain.state_dict())
    assert apart(dict(whole), dict(plain.state_dict())) < CLOSE
    # Names of parameters are what optimizers, callbacks and users' filters see.
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in plain.named_parameters()]


def full_checkpoint(kind, folder):
    module = build(kind)
    trainer = fit(module, chunked(save_distributed_checkpoint=False), max_epochs=2)
    path = Path(folder, "full.ckpt")
    trainer.save_checkpoint(path)
    assert all_sharded(module)
    dist.barrier()
    assert path.is_file()
    loaded = torch.load(path, weights_only=True)
    bare = kind()
    assert loaded["state_dict"].keys() == bare.state_dict().keys()
    bare.load_state_dict(loaded["state_dict"], strict=True)
    assert apart(parameters(bare), parameters(module)) == 0
    by_class = kind.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    assert apart(parameters(by_class), parameters(module)) == 0
    again = kind()
    trainer_of(chunked(), limit_val_batches=1).validate(again, loader(), ckpt_path=str(path), verbose=False)
    assert apart(parameters(again), parameters(module)) == 0
    # Training goes on after saving.
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader())
    assert len(module.seen) == 9


def resumed(kind, distributed, folder):
    options = {"save_distributed_checkpoint": distributed}
    uninterrupted = build(kind)
    fit(uninterrupted, chunked(**options), max_epochs=4)

    saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    first = build(kind)
    trainer = fit(first, chunked(**options), max_epochs=2, callbacks=[saving], enable_checkpointing=True)
    path = Path(folder, "epoch=1.ckpt")
    assert path.is_dir() == distributed
    assert trainer.global_step == 6

    torch.manual_seed(123)  # other initial values, which the checkpoint replaces
    second = kind()
    trainer = trainer_of(chunked(**options), max_epochs=4)
    trainer.fit(second, loader(), ckpt_path=str(path))
    assert trainer.global_step == 12
    assert [r.chunks for r in second.reports] == [12] * 6
    assert len(second.seen) == 6
    assert max(map(apart, second.seen, uninterrupted.seen[6:])) == 0
    assert apart(parameters(second), parameters(uninterrupted)) == 0
    if kind is Scheduled:
        assert second.steps == uninterrupted.steps == 12
        assert trainer.optimizers[0].param_groups[0]["lr"] == 1e-2 / 2**6
    return {name: p.item() for name, p in second.named_parameters() if p.ndim == 0}


def test_keys_are_those_of_the_plain_module():
    run_on_ranks(2, keys_of_state_dict)


@pytest.mark.parametrize("kind", [Toy, Scheduled])
def test_a_full_checkpoint_loads_into_a_bare_module(kind, tmp_path):
    run_on_ranks(2, full_checkpoint, kind, str(tmp_path))


@pytest.mark.parametrize("distributed", [True, False], ids=["sharded", "full"])
@pytest.mark.parametrize("kind", [Toy, Scheduled])
def test_a_resumed_run_equals_the_uninterrupted_one(kind, distributed, tmp_path):
    first, second = run_on_ranks(2, resumed, kind, distributed, str(tmp_path))
    assert first == second


class First(Toy):
    def on_train_start(self):
        self.first = parameters(self)


def saved_sharded(folder):
    module = build()
    trainer = fit(module, max_epochs=2)
    trainer.save_checkpoint(Path(folder, "sharded.ckpt"))
    return parameters(module)


def loaded_on_one_rank(path, expected):
    module = First()
    trainer = trainer_of(chunked(), max_epochs=3)
    trainer.fit(module, loader(), ckpt_path=path)
    assert apart(module.first, expected) == 0
    assert len(module.seen) == 6


def test_a_sharded_checkpoint_loads_on_another_number_of_ranks(tmp_path):
    expected, _ = run_on_ranks(2, saved_sharded, str(tmp_path))
    run_on_ranks(1, loaded_on_one_rank, str(tmp_path / "sharded.ckpt"), expected)
