"""``ModelCheckpoint`` next to the stock strategy: the same files and contents, and runs that resume from them.

Windows are of four micro-batches, and validation comes after every third: most of what is saved then, and what is
saved when the run fails, is of the middle of a window.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_chunkmbs.consolidate import consolidate
from tests.lockstep_models import (
    Lm,
    assert_alike,
    assert_close,
    assert_lockstep,
    build,
    our_strategy,
    stock_strategy,
    trainer_of,
)
from tests.ranks import run_on_ranks
from tests.strategy_models import parameters

KINDS = {
    "top": {"monitor": "val_loss", "save_top_k": 2, "save_last": True, "save_on_train_epoch_end": False},
    "linked": {"every_n_train_steps": 2, "save_last": "link"},
    "steps": {"every_n_train_steps": 3, "save_top_k": -1, "filename": "at{step}", "auto_insert_metric_name": False},
    "weights": {"monitor": "loss_epoch", "mode": "max", "save_weights_only": True, "save_on_train_epoch_end": True},
    "timed": {"train_time_interval": timedelta(0), "save_top_k": -1, "filename": "{step}"},
    "failed": {"every_n_epochs": 100, "save_on_exception": True, "filename": "{step}"},
}


class Saving(ModelCheckpoint):
    """One of several in a Trainer."""

    def __init__(self, folder, name):
        super().__init__(Path(folder, name), **KINDS[name])
        self.name = name

    @property
    def state_key(self):
        return self.name


class Failing(Callback):
    """Fails on every rank in the middle of the third epoch's second window."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (2, 5):
            raise ArithmeticError("as if by accident")


class Trained(NamedTuple):
    module: Any
    trainer: Any

    @property
    def chosen(self):
        """What each callback knows."""
        return {c.name: c.state_dict() for c in self.trainer.checkpoint_callbacks}


def train(stock, sharded, folder, *callbacks, ckpt_path=None):
    strategy = stock_strategy() if stock else our_strategy()
    strategy._save_distributed_checkpoint = sharded
    callbacks = [*callbacks, *(Saving(folder, name) for name in KINDS)]
    limits = {"max_epochs": 3, "limit_val_batches": 2, "val_check_interval": 3, "accumulate_grad_batches": 4}
    module = build(Lm, stock)
    trainer = trainer_of(strategy, enable_checkpointing=True, callbacks=callbacks, **limits)
    try:
        trainer.fit(module, ckpt_path=ckpt_path)
    except ArithmeticError:
        assert any(isinstance(callback, Failing) for callback in callbacks)
    return Trained(module, trainer)


def names(folder):
    """Every checkpoint, and where links lead."""
    dist.barrier()
    paths = sorted(Path(folder).glob("*/*"))
    return {f"{path.parent.name}/{path.name}": os.readlink(path) if path.is_symlink() else None for path in paths}


def rename(path, other):
    dist.barrier()
    if dist.get_rank() == 0:
        os.rename(path, other)
    dist.barrier()


def session(stock, sharded, folder):
    """A run that fails, the best checkpoint validated, and a run from the last one; then the folder is put away."""
    run = str(Path(folder, "run"))
    first = train(stock, sharded, run, Failing())
    found = [names(run), first.chosen]
    if not stock:
        assert_lockstep(first, [4, 3, 4, 3, 4])
        # As processes leave the best and the last one that were killed while they wrote over them.
        top = first.trainer.checkpoint_callback
        for path in map(Path, (top.best_model_path, top.last_model_path)):
            rename(path, path.with_name(f"{path.stem}.old.ckpt"))
    (scores,) = first.trainer.validate(first.module, ckpt_path="best", verbose=False)
    found.append(torch.tensor(scores["val_loss"]))
    again = train(stock, sharded, run, ckpt_path="last")
    if not stock:
        assert_lockstep(again, [1, 3])
        rename(Path(first.trainer.ckpt_path).with_suffix(".old.ckpt"), first.trainer.ckpt_path)
    found += [names(run), again.chosen, again.module.progress, again.trainer.global_step]
    rename(run, Path(folder, "stock" if stock else "ours"))
    return found, parameters(again.module)


def contents(path, sharded):
    whole = path
    if sharded:
        whole = path.parent / "one.pt"
        whole.unlink(missing_ok=True)
        consolidate(path, whole, weights_only=False)
    return torch.load(whole, weights_only=False)


def side_by_side(sharded, folder):
    ours, our_parameters = session(False, sharded, folder)
    stock, stock_parameters = session(True, sharded, folder)
    assert_alike(ours, stock)
    assert_close(our_parameters, stock_parameters)
    if dist.get_rank() == 0:
        for name in ours[3]:
            assert Path(folder, "ours", name).is_dir() == sharded
            assert_alike(*(contents(Path(folder, who, name), sharded) for who in ("ours", "stock")), name)
    return ours


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_every_option_does_what_it_does_with_stock(sharded, tmp_path):
    found = run_on_ranks(2, side_by_side, sharded, str(tmp_path))
    saved, chosen, validated, after, _, progress, steps = found[0]
    assert saved["linked/last.ckpt"] == "epoch=1-step=4.ckpt"
    for name in ("steps/at3.ckpt", "timed/step=1.ckpt", "timed/step=5.ckpt", "failed/step=5.ckpt", "top/last.ckpt"):
        assert name in saved
    assert len([name for name in saved if name.startswith("top/epoch")]) == 2
    assert len([name for name in saved if name.startswith("weights/")]) == 1
    assert validated.item() == pytest.approx(chosen["top"]["best_model_score"].item(), abs=1e-6)
    # From the third micro-batch of a window on: what was back-propagated before is lost, as with stock.
    assert progress == [(3, 5), (4, 5), (5, 5), (6, 6)]
    assert steps == 6
    assert "timed/step=6.ckpt" in after
    assert "steps/at6.ckpt" in after
