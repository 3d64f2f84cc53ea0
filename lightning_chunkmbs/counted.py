"""FSDP2's collectives with their calls, bytes and exposed time counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from .report import StepCounter
from .streams import Mark, Streams, streams_for


class Collective(Protocol):
    """What FSDP2 calls to communicate."""

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return memory for the collective."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Communicate; FSDP2 passes all arguments by name."""


class Counted:
    """A collective of FSDP2 that counts its calls and bytes.

    Args:
        collective: what it stands for.
        calls: the field of the step report for its calls.
        nbytes: the field for its bytes.
        tensor: the argument whose bytes count.
        counter: counts them.
    """

    def __init__(self, collective: Collective, calls: str, nbytes: str, tensor: str, counter: StepCounter) -> None:
        self._collective = collective
        self._calls, self._nbytes, self._tensor = calls, nbytes, tensor
        self._counter = counter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collective, name)

    def __call__(self, **kwargs: Any) -> Any:
        self._counter.add(self._calls)
        self._counter.add(self._nbytes, kwargs[self._tensor].nbytes)
        return self._collective(**kwargs)


class CountedGather(Counted):
    """An all-gather of FSDP2 that also counts for how long computation stands still for it.

    Args:
        collective: what it stands for.
        counter: counts it.
        streams: streams of a device.
        versions: returns marks of what is gathered, which are others once it was written to.
    """

    def __init__(
        self,
        collective: Collective,
        counter: StepCounter,
        streams: Callable[[torch.device], Streams] = streams_for,
        versions: Callable[[], list[int]] = list,
    ) -> None:
        super().__init__(collective, "all_gathers", "gathered_bytes", "output_tensor", counter)
        self._versions = versions
        self._gathered: list[int] = []
        self._streams_for = streams
        self._streams: Streams | None = None
        self._end: Mark | None = None

    def __call__(self, **kwargs: Any) -> Any:
        self._gathered = self._versions()
        start = time.perf_counter()
        work = super().__call__(**kwargs)
        device = kwargs[self._tensor].device
        if device.type == "cpu":
            self._counter.add("exposed_gather_seconds", time.perf_counter() - start)
        else:
            # FSDP2 calls this on the stream that communicates.
            self._streams = self._streams_for(device)
            self._end = self._streams.compute().mark()
        return work

    def is_stale(self) -> bool:
        """Return whether what was gathered has been written to since."""
        return self._gathered != self._versions()

    def waits(self, work: Any = None) -> None:
        """Called where the compute stream, or a CPU, is about to wait for the gather (on a CPU for its ``work``)."""
        if work is not None:
            start = time.perf_counter()
            work.wait()
            self._counter.add("exposed_gather_seconds", time.perf_counter() - start)
        end, self._end = self._end, None
        if end is not None and self._streams is not None:
            needed = self._streams.compute().mark()
            self._counter.add_later("exposed_gather_seconds", lambda: _at_least_0(end.seconds_since(needed)))


def _at_least_0(seconds: float | None) -> float | None:
    return None if seconds is None else max(0.0, seconds)
