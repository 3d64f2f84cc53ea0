"""What one optimizer step did, counted where it happens, and notices given once."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch.distributed as dist

logger = logging.getLogger("lightning_chunkmbs")


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Counts of one optimizer step on this rank; validation passes in between are not in it.

    Attributes:
        all_gathers: parameter all-gathers issued by FSDP2 (none in a group of one rank).
        reduce_scatters: gradient reduce-scatters issued by FSDP2 (none in a group of one rank).
        blocks: block calls run with gradients.
        chunks: chunks these block calls were cut into, recomputation not counted.
        offloaded_bytes: bytes of entry activations copied to the host.
        reloaded_bytes: bytes of entry activations brought back for recomputation.
    """

    all_gathers: int = 0
    reduce_scatters: int = 0
    blocks: int = 0
    chunks: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0


class StepCounter:
    """The running counts of the current optimizer step."""

    def __init__(self) -> None:
        self._counts = asdict(StepReport())
        self._paused = 0

    def add(self, name: str, amount: int = 1) -> None:
        """Add ``amount`` to the field ``name`` of the next :class:`StepReport`, unless paused."""
        if not self._paused:
            self._counts[name] += amount

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


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
