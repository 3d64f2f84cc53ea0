"""Signals that ask a run to end or to save, answered where all ranks are at the same place.

[Note: noted, then answered]
Lightning answers SIGTERM by a broadcast, and SLURM's signal by a checkpoint, from within the signal's handler: in the
middle of a step, perhaps in a collective. Ranks that are elsewhere then, or were not sent the signal, wait for each
other until the timeout. With several ranks a handler here only notes the signal. Before each window and before each
batch of an evaluation the ranks tell each other what they have noted, in one all-reduce on the host, and all answer.

Touches the private parts of Lightning's signal handling.
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


class DeferredSignals:
    """Takes the place of Lightning's handlers, for one run of a Trainer.

    Args:
        trainer: the Trainer; its handlers are not registered yet.
        agree: agrees with all ranks on numbers.

    Raises:
        RuntimeError: Lightning has no such handlers.
    """

    def __init__(self, trainer: Any, agree: Agree) -> None:
        self._trainer, self._agree = trainer, agree
        self._connector = trainer._signal_connector
        self._noted: dict[str, int] = {}  # signals' numbers by the handler that would have answered
        self._save: Callable[[int, Any], None] | None = None
        if trainer.world_size == 1:
            return
        if not all(hasattr(type(self._connector), name) for name in (_END, _SAVE)):
            raise RuntimeError(
                f"Lightning {lightning.__version__} handles signals otherwise than this package expects, which is "
                f"written for lightning 2.6. Install that."
            )
        self._save = getattr(type(self._connector), _SAVE).__get__(self._connector)
        setattr(self._connector, _END, self._note_end)
        setattr(self._connector, _SAVE, self._note_save)

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
        if self._save is None:
            return
        # The least of all ranks' numbers: 0 stands for a signal's absence, so that negative ones are found.
        end, save = (-number for number in self._agree([-self._noted.get(name, 0) for name in (_END, _SAVE)]))
        self._noted.pop(_SAVE, None)
        if save:
            self._save(save, None)
        if end:
            self._connector.received_sigterm = True
            raise SIGTERMException
