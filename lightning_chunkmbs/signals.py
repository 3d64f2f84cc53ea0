"""Signals that ask a run to end or to save, answered where all ranks are at the same place.

[Note: noted, then answered]
Lightning answers SIGTERM by a broadcast, and SLURM's signal by a checkpoint, from within the signal's handler: in the
middle of a step, perhaps in a collective. Ranks that are elsewhere then, or were not sent the signal, wait for each
other until the timeout. A handler here only notes the signal, also on a single rank: in the middle of a window there is
nothing to resume at. Before each window, at the end of an epoch and before each batch of an evaluation the ranks tell
each other what they have noted, in one all-reduce on the host, and all answer.

[Note: before a window is before its first batch is fetched]
The state of a loader is part of a checkpoint. Once a batch is fetched, a checkpoint says that it was trained on. So a
window's signals are answered before Lightning's loop of batches advances, and those of an epoch's last window where its
loop of epochs has completed the epoch: the next one's start is no place to resume at.

Touches the private parts of Lightning's signal handling and, as ``window.py`` does, of its loops.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning
from lightning.pytorch.utilities.exceptions import SIGTERMException

from .agree import Agree

_log = logging.getLogger(__name__)
_END, _SAVE = "_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"  # Lightning's handlers
_BATCH, _EPOCH_END = "advance", "on_advance_end"  # of its loops: fetches and runs a batch; completes an epoch


class DeferredSignals:
    """Takes the place of Lightning's handlers, for one run of a Trainer.

    Args:
        trainer: the Trainer; its handlers are not registered yet.
        agree: agrees with all ranks on numbers.
        ended: called where a batch was to be fetched and there is none.

    Raises:
        RuntimeError: Lightning has no such handlers.
    """

    def __init__(self, trainer: Any, agree: Agree, ended: Callable[[], None]) -> None:
        self._trainer, self._agree, self._ended = trainer, agree, ended
        self._connector = trainer._signal_connector
        self._noted: dict[str, int] = {}  # signals' numbers by the handler that would have answered
        fit_loop = trainer.fit_loop
        replaced = [
            (self._connector, _END, self._note_end),
            (self._connector, _SAVE, self._note_save),
            (fit_loop.epoch_loop, _BATCH, self._batch),
            (fit_loop, _EPOCH_END, self._epoch_end),
        ]
        if not all(hasattr(type(owner), name) for owner, name, _ in replaced):
            raise RuntimeError(
                f"Lightning {lightning.__version__} handles signals otherwise than this package expects, which is "
                f"written for lightning 2.6. Install that."
            )
        self._save, self._run_batch, self._end_epoch = (original(owner, name) for owner, name, _ in replaced[1:])
        for owner, name, ours in replaced:
            setattr(owner, name, ours)

    def _note_end(self, signum: int, _frame: Any) -> None:
        _log.info("Rank %d received signal %d and ends with all ranks.", self._trainer.global_rank, signum)
        launcher = self._trainer.strategy.launcher
        if launcher is not None and _END not in self._noted:
            launcher.kill(signum)  # the processes that this one started
        self._noted[_END] = signum

    def _note_save(self, signum: int, _frame: Any) -> None:
        self._noted[_SAVE] = signum

    def answer(self) -> None:
        """Answer what any rank has noted; all ranks must call this at the same place.

        Raises:
            SIGTERMException: some rank was told to end; raised on every rank.
        """
        # The least of all ranks' numbers: 0 stands for a signal's absence, so that negative ones are found.
        end, save = (-number for number in self._agree([-self._noted.get(name, 0) for name in (_END, _SAVE)]))
        if save:  # one that came while the ranks agreed waits for the next time
            self._noted.pop(_SAVE, None)
            self._save(save, None)
        if end:
            self._connector.received_sigterm = True
            raise SIGTERMException

    def _batch(self, fetcher: Any) -> None:
        if (self._trainer.fit_loop.epoch_loop.batch_idx + 1) % self._trainer.accumulate_grad_batches == 0:
            self.answer()
        try:
            self._run_batch(fetcher)
        except StopIteration:
            self._ended()
            raise

    def _epoch_end(self) -> None:
        self._end_epoch()
        self.answer()


def original(owner: Any, name: str) -> Callable[..., Any]:
    """Return the method that an attribute of ``owner`` stands in for."""
    method: Callable[..., Any] = getattr(type(owner), name).__get__(owner)  # also in a Trainer's second run
    return method
