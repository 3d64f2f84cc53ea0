"""What one optimizer step did, counted where it happens, and notices given once."""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

logger = logging.getLogger("lightning_chunkmbs")


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Counts of one optimizer step on this rank; validation passes in between are not in it.

    Times are no part of comparisons. On an accelerator they are read without keeping anything waiting: what has not
    ended when the report is made is in the next one.

    Attributes:
        all_gathers: parameter all-gathers issued by FSDP2 (none in a group of one rank).
        reduce_scatters: gradient reduce-scatters issued by FSDP2 (none in a group of one rank).
        gathered_bytes: bytes of the parameters that all-gathers brought together, this rank's own part included.
        reduced_bytes: bytes of the gradients that went into reduce-scatters.
        blocks: block calls run with gradients.
        calls: micro-batches' calls that these block calls ran; in lockstep one for each micro-batch.
        chunks: chunks these block calls were cut into, recomputation not counted.
        offloaded_bytes: bytes of entry activations copied to the host.
        reloaded_bytes: bytes of entry activations brought back for recomputation.
        host_bytes: most bytes of host memory held for activations, buffers that wait to be used again included.
        exposed_copy_seconds: how long the compute stream stood still for copies to and from the host; 0 on a CPU.
        exposed_gather_seconds: how long the compute stream, or a CPU, stood still for all-gathers.
    """

    all_gathers: int = 0
    reduce_scatters: int = 0
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    blocks: int = 0
    calls: int = 0
    chunks: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    host_bytes: int = 0
    exposed_copy_seconds: float = field(default=0.0, compare=False)
    exposed_gather_seconds: float = field(default=0.0, compare=False)


class StepCounter:
    """The running counts of the current optimizer step."""

    def __init__(self) -> None:
        self._counts: dict[str, Any] = asdict(StepReport())
        self._paused = 0
        self._later: deque[tuple[str, Callable[[], float | None]]] = deque()

    def add(self, name: str, amount: float = 1) -> None:
        """Add ``amount`` to the field ``name`` of the next :class:`StepReport`, unless paused."""
        if not self._paused:
            self._counts[name] += amount

    def add_later(self, name: str, amount: Callable[[], float | None]) -> None:
        """Add what ``amount()`` returns, unless paused, once that is a number; it is asked again while it is None."""
        if not self._paused:
            self._later.append((name, amount))
            self._settle()

    def keep_most(self, name: str, amount: int) -> None:
        """Let the field ``name`` be ``amount`` at least, unless paused."""
        if not self._paused:
            self._counts[name] = max(self._counts[name], amount)

    def _settle(self) -> None:
        # In the order of the device's work, so that one that is not known yet ends it.
        while self._later and (amount := self._later[0][1]()) is not None:
            self._counts[self._later.popleft()[0]] += amount

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside: passes that are no part of an optimizer step."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def take(self) -> StepReport:
        """Return the counts so far and start again from zero."""
        self._settle()
        report = StepReport(**self._counts)
        self._counts = asdict(StepReport())
        return report


class Notices:
    """Warnings and log lines given once each for one model; on the first rank unless said."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def _is_new(self, key: str) -> bool:
        new = key not in self._given
        self._given.add(key)
        return new

    def warn(self, key: str, message: str) -> None:
        """Warn with ``message`` the first time ``key`` is seen."""
        if self._is_new(key) and _rank() == 0:
            warnings.warn(message, UserWarning, stacklevel=2)

    def warn_here(self, key: str, message: str) -> None:
        """Warn on this rank, whichever it is, the first time ``key`` is seen."""
        if self._is_new(key):
            warnings.warn(f"rank {_rank()}: {message}", UserWarning, stacklevel=2)

    def log(self, key: str, message: str) -> None:
        """Log ``message`` at level INFO the first time ``key`` is seen."""
        if self._is_new(key) and _rank() == 0:
            logger.info(message)


class NoNotices(Notices):
    """Gives none."""

    def _is_new(self, key: str) -> bool:
        return False


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
