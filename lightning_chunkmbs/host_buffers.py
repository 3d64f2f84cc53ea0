"""Host memory of the activation store: exact sizes, used again step after step, never more than was needed at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from .streams import Event


class HostBuffer:
    """Memory for one activation.

    Attributes:
        memory: uint8, ``[nbytes]``.
        nbytes: its size.
        filled: when the copy into it has ended.
        read: when the last copy out of it has ended; None if there was none since it was filled.
        age: counts up with every buffer that is given back.
    """

    __slots__ = ("__weakref__", "age", "filled", "memory", "nbytes", "read")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.nbytes = memory.nbytes
        self.filled: Event | None = None
        self.read: Event | None = None
        self.age = 0

    def view(self, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
        """Return the memory as a tensor that fills it."""
        return self.memory.view(dtype).as_strided(shape, stride)

    def __del__(self) -> None:
        # The memory goes now, and a device may still be at it.
        for event in (self.filled, self.read):
            if event is not None and not event.done():
                event.synchronize()


class HostBuffers:
    """A pool of buffers.

    What is allocated, in use or idle, never exceeds the most bytes that were ever in use at once: batches of changing
    shapes would else fill the host with buffers of sizes that do not come again.

    Attributes:
        live: bytes in use.
        idle: bytes waiting to be used again.
        allocations: how many buffers were allocated so far.
    """

    def __init__(self) -> None:
        self.live = 0
        self.idle = 0
        self.allocations = 0
        self._most = 0
        self._ages = 0
        # Last in, first out: the buffer that was used last is the one whose memory is warm.
        self._stacks: dict[int, deque[HostBuffer]] = {}

    def get(self, nbytes: int, allocate: Callable[[int], Tensor]) -> HostBuffer:
        """Return a buffer of ``nbytes``, an idle one if there is one."""
        buffer = self._idle(nbytes) if nbytes in self._stacks else self._new(nbytes, allocate)
        self.live += nbytes
        self._most = max(self._most, self.live)
        return buffer

    def give_back(self, buffer: HostBuffer) -> None:
        """Take back a buffer; copies into and out of it may still be under way."""
        self._ages += 1
        buffer.age = self._ages
        self._stacks.setdefault(buffer.nbytes, deque()).append(buffer)
        self.live -= buffer.nbytes
        self.idle += buffer.nbytes

    def _idle(self, nbytes: int) -> HostBuffer:
        return self._take_out(nbytes, self._stacks[nbytes].pop)

    def _new(self, nbytes: int, allocate: Callable[[int], Tensor]) -> HostBuffer:
        most = max(self._most, self.live + nbytes)
        while self._stacks and self.live + self.idle + nbytes > most:
            oldest = min(self._stacks, key=lambda size: self._stacks[size][0].age)
            self._take_out(oldest, self._stacks[oldest].popleft)
        buffer = HostBuffer(allocate(nbytes))
        self.allocations += 1
        return buffer

    def _take_out(self, nbytes: int, take: Callable[[], HostBuffer]) -> HostBuffer:
        buffer = take()
        self.idle -= nbytes
        if not self._stacks[nbytes]:
            del self._stacks[nbytes]
        return buffer
