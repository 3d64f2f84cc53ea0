"""Why a run ended: each rank tells the others what made it fail.

A rank that fails leaves the others waiting in a collective. They fail when its connections close or when the group's
timeout is over, with an error of the network that says nothing of the cause. So a rank that fails writes its error to
the store through which the process group was set up, and a rank whose error is one of communication looks there.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

_GRACE = 10.0  # seconds in which other ranks notice the same failure
_ANSWER = 5.0  # seconds more that the store may take
_UNREACHABLE = "Rank 0, which hosts the group's store, cannot be reached any more: see its log for the cause."
_SIGNS = ("gloo", "nccl", "hccl", "connection closed by peer", "connection reset", "broken pipe", "timed out")

# Each process makes its runs in the same order, so that a run has the same number on all ranks.
_runs = itertools.count()


class _Report(NamedTuple):
    """What a rank said: its place in the order of failing, whether it only lost others, and its error."""

    order: int
    lost_others: bool
    summary: str


def is_communication_error(error: BaseException) -> bool:
    """Return whether ``error`` says that other ranks were lost, and not what is wrong here."""
    if not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(sign in str(error).lower() for sign in _SIGNS)


class Failures:
    """The errors of one run's ranks. Made by every rank, once for each run."""

    def __init__(self) -> None:
        run = next(_runs)
        self._rank = self._size = 0
        self._store: Any = None
        default_store = getattr(dist.distributed_c10d, "_get_default_store", None)
        if dist.is_initialized() and default_store is not None:
            self._rank, self._size = dist.get_rank(), dist.get_world_size()
            self._store = dist.PrefixStore(f"chunkmbs/failures/{run}", default_store())

    def explain(self, error: BaseException) -> None:
        """Tell other ranks of ``error``, and add to it what they tell if it is one of communication."""
        if self._store is None or self._size < 2:
            return
        notes = [_UNREACHABLE if is_communication_error(error) else ""]
        # Aside, since a store at the other end of a broken connection may not answer, and nothing then ends the wait.
        asking = threading.Thread(target=self._ask, args=(error, notes), daemon=True)
        asking.start()
        asking.join(_GRACE + _ANSWER)
        if notes[-1]:
            _add_note(error, notes[-1])

    def _ask(self, error: BaseException, notes: list[str]) -> None:
        with suppress(RuntimeError):  # whatever the store raises when its host is gone
            self._tell(error)
            notes.append(self._cause() if is_communication_error(error) else "")

    def _tell(self, error: BaseException) -> None:
        order = self._store.add("count", 1)
        summary = f"{type(error).__name__}: {error}"[:2000]
        self._store.set(str(self._rank), json.dumps(_Report(order, is_communication_error(error), summary)))

    def _cause(self) -> str:
        """What made other ranks fail, as far as they say so in time."""
        end = time.monotonic() + _GRACE
        while True:
            reports = self._reports()
            causes = [
                (report.order, rank, report.summary) for rank, report in reports.items() if not report.lost_others
            ]
            if causes:
                _, rank, summary = min(causes)
                return f"Rank {rank} failed first, and this rank by it: {summary}"
            silent = [rank for rank in range(self._size) if rank not in reports]
            if not silent:
                return "No rank failed by itself: the connection between them was lost or too slow for the timeout."
            if time.monotonic() > end:
                return (
                    f"Of rank {', '.join(map(str, silent))} nothing was heard: it was killed (host memory?), hangs, or "
                    f"cannot be reached. See its log for the cause."
                )
            time.sleep(0.1)

    def _reports(self) -> dict[int, _Report]:
        told = [rank for rank in range(self._size) if self._store.check([str(rank)])]
        return {rank: _Report(*json.loads(self._store.get(str(rank)))) for rank in told}


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif len(error.args) == 1:  # Python 3.10
        error.args = (f"{error.args[0]}\n{note}",)
