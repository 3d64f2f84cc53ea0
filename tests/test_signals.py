"""Signals that reach some ranks, or the ranks in different places, are answered by all in the same place."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors import signal_connector
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_chunkmbs.signals import DeferredSignals
from tests.models import Loader, Stack, Trained, batches, chunked, make_trainer
from tests.ranks import run_on_ranks
from tests.strategy_models import parameters

N, BATCHES, EPOCHS = 2, 5, 2  # an epoch's last window has one micro-batch
WINDOWS = 3  # of an epoch


class Told(Trained):
    """Ranks are sent a signal inside their step."""

    told: dict[int, tuple[int, int]] | None = None  # by rank the epoch and the batch at which it is
    stage = "training"
    seen: tuple[float, ...] = ()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.tell("starting", batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.seen = (*self.seen, batch.sum().item())
        self.tell("training", batch_idx)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch)
        self.tell("validating", batch_idx)

    def tell(self, stage: str, batch_idx: int) -> None:
        if stage == self.stage and (self.told or {}).get(dist.get_rank()) == (self.current_epoch, batch_idx):
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
    return batches([2] * BATCHES, seed=dist.get_rank())


class Stateful(Loader):
    """Goes on where its state was taken, if that was within an epoch."""

    at = 0
    resumed = False

    def __iter__(self) -> Iterator[Any]:
        self.at, self.resumed = self.at if self.resumed else 0, False
        while self.at < len(self.data):
            self.at += 1
            yield self.data[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.resumed = state["at"] % len(self.data), True


def run(module: Told, options: dict[str, Any], ckpt_path: str | None = None) -> Trainer:
    trainer = make_trainer(chunked(), accumulate_grad_batches=N, max_epochs=EPOCHS, **options)
    trainer.fit(module, Stateful(data()), Loader(data()[:2]), ckpt_path=ckpt_path)
    return trainer


def ended(stage: str, told: dict[int, tuple[int, int]], options: dict[str, Any], folder: str) -> tuple[int, bool, bool]:
    """How many batches were trained on, and whether what was saved then goes on as if nobody had been told to end."""
    module, resumed, whole = build(told=told, stage=stage), build(), build()
    with pytest.raises(SIGTERMException):
        run(module, options | {"enable_checkpointing": True, "callbacks": [OnExceptionCheckpoint(folder, "saved")]})
    assert module.trainer.received_sigterm
    run(whole, options)
    again = run(resumed, options, f"{folder}/saved.ckpt")
    assert again.global_step == EPOCHS * WINDOWS
    expected = parameters(whole)
    same = all(torch.equal(value, expected[name]) for name, value in parameters(resumed).items())
    return len(module.seen), (*module.seen, *resumed.seen) == whole.seen, same


PLACES = {
    "one rank": ("training", {1: (0, 2)}, {}, 4),
    "ranks in different places": ("training", {0: (0, 2), 1: (0, 3)}, {}, 4),
    "the epoch's last window": ("training", {1: (0, 4)}, {"limit_val_batches": 0}, 5),
    "a later epoch": ("training", {1: (1, 0)}, {}, 7),
    "validation's first batch": ("validating", {1: (0, 0)}, {}, 5),
    "validation's last batch": ("validating", {1: (0, 1)}, {}, 5),
    "a validation within the epoch": ("validating", {1: (0, 0)}, {"val_check_interval": 2}, 2),
    "the last batch of one": ("validating", {1: (0, 1)}, {"val_check_interval": 2}, 2),
}


@pytest.mark.parametrize(("stage", "told", "options", "trained"), PLACES.values(), ids=PLACES)
def test_all_ranks_end_where_a_checkpoint_resumes_exactly(stage, told, options, trained, tmp_path):
    assert run_on_ranks(2, ended, stage, told, options, str(tmp_path)) == [(trained, True, True)] * 2


def test_one_rank_ends_before_the_next_window_too(tmp_path):
    """Lightning's handler would end it with this batch, the first of its window, put aside."""
    assert run_on_ranks(1, ended, "starting", {0: (0, 2)}, {}, str(tmp_path)) == [(4, True, True)]


def ended_in_validation() -> tuple[int, int]:
    module = build(told={1: (0, 1)}, stage="validating")
    trainer = make_trainer(chunked())
    with pytest.raises(SIGTERMException):
        trainer.fit(module, Loader(data()), Loader(data()))
    return trainer.global_step, trainer.fit_loop.epoch_loop.val_loop.batch_progress.current.completed


def test_all_ranks_end_before_the_next_batch_of_a_validation():
    assert run_on_ranks(2, ended_in_validation) == [(BATCHES, 2)] * 2


def ended_late(stage: str) -> int:
    """The signal comes in what a run does last; the optimizer steps that it has made."""
    module = build(told={1: (0, BATCHES - 1)}, stage=stage)
    trainer = make_trainer(chunked(), accumulate_grad_batches=N)
    with pytest.raises(SIGTERMException):
        trainer.fit(module, Loader(data())) if stage == "training" else trainer.validate(module, Loader(data()))
    return trainer.global_step


@pytest.mark.parametrize(("stage", "steps"), [("training", WINDOWS), ("validating", 0)])
def test_a_signal_in_the_last_window_ends_all_ranks_when_the_run_ends(stage, steps):
    assert run_on_ranks(2, ended_late, stage) == [steps] * 2


class Requeued(Told):
    def send(self) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)


@contextmanager
def under_slurm() -> Iterator[list[Any]]:
    """Runs as a job of SLURM; yields what it is asked for."""
    asked: list[Any] = []
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    job = {"SLURM_JOB_ID": "12", "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0"}
    job |= {"SLURM_NTASKS": size, "SLURM_NTASKS_PER_NODE": size}
    with (
        patch.dict(os.environ, job),
        patch.object(signal_connector, "call", lambda command: asked.append(command) or 0),
    ):
        yield asked


def on_slurm(folder: str) -> Trainer:
    return make_trainer(
        chunked(save_distributed_checkpoint=False),
        accumulate_grad_batches=N,
        default_root_dir=folder,
        plugins=[SLURMEnvironment()],
    )


def saved_for_requeue(folder: str) -> tuple[list[int], int, list[Any]]:
    """The steps of the checkpoints, the last step, and what SLURM was asked for."""
    module = Requeued(Stack())
    module.told = {1: (0, 2)}
    with under_slurm() as asked:
        trainer = on_slurm(folder)
        trainer.fit(module, Loader(data()))
    dist.barrier()
    saved = [torch.load(path, weights_only=True)["global_step"] for path in Path(folder).glob("hpc_ckpt_*.ckpt")]
    return saved, trainer.global_step, asked


def test_slurm_s_signal_to_one_rank_saves_on_all_before_the_next_window(tmp_path):
    first, second = run_on_ranks(2, saved_for_requeue, str(tmp_path))
    assert first == ([2], WINDOWS, [["scontrol", "requeue", "12"]])
    assert second == ([2], WINDOWS, [])


def signalled_while_agreeing(folder: str) -> tuple[int, list[Any]]:
    """How many checkpoints a signal gave that came while the ranks told each other of signals."""
    module, rounds = Told(Stack()), []
    with under_slurm() as asked:
        trainer = on_slurm(folder)
        agree = DeferredSignals.answer

        def answer(self: DeferredSignals) -> None:
            own = self._agree

            def agreeing(numbers: list[int]) -> list[int]:
                rounds.append(numbers)
                if dist.get_rank() == 1 and len(rounds) == 2:
                    os.kill(os.getpid(), signal.SIGUSR1)
                return own(numbers)

            with patch.object(self, "_agree", agreeing):
                agree(self)

        with patch.object(DeferredSignals, "answer", answer):
            trainer.fit(module, Loader(data()))
    dist.barrier()
    return len(list(Path(folder).glob("hpc_ckpt_*.ckpt"))), asked


def test_a_signal_that_comes_while_ranks_agree_is_answered_next(tmp_path):
    first, second = run_on_ranks(2, signalled_while_agreeing, str(tmp_path))
    assert first == (1, [["scontrol", "requeue", "12"]])
    assert second == (1, [])


def unknown() -> None:
    trainer = make_trainer(chunked())
    with (
        patch("lightning_chunkmbs.signals._END", "_other"),
        pytest.raises(RuntimeError, match=r"handles signals otherwise than this package expects"),
    ):
        trainer.fit(build(), Loader(data()))


def test_a_lightning_without_these_handlers_is_refused():
    run_on_ranks(2, unknown)
