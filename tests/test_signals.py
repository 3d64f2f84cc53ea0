"""Signals that reach some ranks, or the ranks in different places, are answered by all in the same place."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.trainer.connectors import signal_connector
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.models import Loader, Stack, Trained, batches, chunked, fit, make_trainer
from tests.ranks import run_on_ranks

N, WINDOWS = 2, 4
SIGNALLED = {"one rank": {1: 2}, "ranks in different places": {0: 2, 1: 3}}  # rank: micro-batch; both of window 1


class Told(Trained):
    """Ranks are sent a signal inside their step."""

    told: dict[int, int] | None = None  # the micro-batch at which a rank is
    stage = "training"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.tell("training", batch_idx)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch)
        self.tell("validating", batch_idx)

    def tell(self, stage: str, batch_idx: int) -> None:
        if stage == self.stage and (self.told or {}).get(dist.get_rank()) == batch_idx:
            self.send()

    def send(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def build(**attributes: Any) -> Told:
    torch.manual_seed(3)
    module = Told(Stack())
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def data() -> list[Any]:
    return batches([2] * N * WINDOWS, seed=dist.get_rank())


class Rest(Loader):
    """An epoch's batches after those of the steps that were saved."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data[2 * N :])


def values(module: Told) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().clone() for name, p in module.named_parameters()}


def ended(told: dict[int, int], folder: str) -> tuple[int, bool]:
    """At which step all were ended, and whether what they saved goes on as if nobody had been."""
    module, whole = build(told=told), build()
    saving = {"enable_checkpointing": True, "callbacks": [OnExceptionCheckpoint(folder, "saved")]}
    trainer = make_trainer(chunked(), accumulate_grad_batches=N, **saving)
    with pytest.raises(SIGTERMException):
        trainer.fit(module, Loader(data()))
    assert trainer.received_sigterm
    fit(whole, data(), chunked(), accumulate_grad_batches=N)
    resumed, again = build(), make_trainer(chunked(), accumulate_grad_batches=N)
    again.fit(resumed, Rest(data()), ckpt_path=f"{folder}/saved.ckpt")
    assert again.global_step == WINDOWS
    expected = values(whole)
    return trainer.global_step, all(torch.equal(value, expected[name]) for name, value in values(resumed).items())


@pytest.mark.parametrize("told", SIGNALLED.values(), ids=SIGNALLED)
def test_all_ranks_end_before_the_next_window_with_a_checkpoint(told, tmp_path):
    assert run_on_ranks(2, ended, told, str(tmp_path)) == [(2, True)] * 2


def ended_in_validation() -> tuple[int, int]:
    module = build(told={1: 1}, stage="validating")
    trainer = make_trainer(chunked())
    with pytest.raises(SIGTERMException):
        trainer.fit(module, Loader(data()), Loader(data()))
    return trainer.global_step, trainer.fit_loop.epoch_loop.val_loop.batch_progress.current.completed


def test_all_ranks_end_before_the_next_batch_of_a_validation():
    assert run_on_ranks(2, ended_in_validation) == [(N * WINDOWS, 2)] * 2


def ended_late(stage: str) -> int:
    """The signal comes in what a run does last; the optimizer steps that it has made."""
    module = build(told={1: N * WINDOWS - 1}, stage=stage)
    trainer = make_trainer(chunked(), accumulate_grad_batches=N)
    with pytest.raises(SIGTERMException):
        trainer.fit(module, Loader(data())) if stage == "training" else trainer.validate(module, Loader(data()))
    return trainer.global_step


@pytest.mark.parametrize(("stage", "steps"), [("training", WINDOWS), ("validating", 0)])
def test_a_signal_in_the_last_window_ends_all_ranks_when_the_run_ends(stage, steps):
    assert run_on_ranks(2, ended_late, stage) == [steps] * 2


class Requeued(Told):
    def send(self) -> None:
        self.trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)


def saved_for_requeue(folder: str) -> tuple[int, int, list[Any]]:
    """The step of the checkpoint, the last step, and what SLURM was asked for."""
    module = Requeued(Stack())
    module.told = {1: 2}
    asked: list[Any] = []
    environment = {"SLURM_JOB_ID": "12"}
    with (
        patch.dict(os.environ, environment),
        patch.object(signal_connector, "call", lambda command: asked.append(command) or 0),
    ):
        trainer = fit(
            module,
            data(),
            chunked(save_distributed_checkpoint=False),
            accumulate_grad_batches=N,
            default_root_dir=folder,
        )
    (path,) = Path(folder).glob("hpc_ckpt_*.ckpt")
    return torch.load(path, weights_only=True)["global_step"], trainer.global_step, asked


def test_slurm_s_signal_to_one_rank_saves_on_all_before_the_next_window(tmp_path):
    first, second = run_on_ranks(2, saved_for_requeue, str(tmp_path))
    assert first == (2, WINDOWS, [["scontrol", "requeue", "12"]])
    assert second == (2, WINDOWS, [])


def alone() -> bool:
    trainer = fit(build(), data(), chunked())
    return "_sigterm_notifier_fn" in vars(trainer._signal_connector)


def test_one_rank_keeps_lightning_s_handlers():
    assert run_on_ranks(1, alone) == [False]
    assert run_on_ranks(2, alone) == [True, True]


def unknown() -> None:
    trainer = make_trainer(chunked())
    with (
        patch("lightning_chunkmbs.signals._END", "_other"),
        pytest.raises(RuntimeError, match=r"handles signals otherwise than this package expects"),
    ):
        trainer.fit(build(), Loader(data()))


def test_a_lightning_without_these_handlers_is_refused():
    run_on_ranks(2, unknown)
