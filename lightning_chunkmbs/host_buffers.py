"""Host memory of the activation store: allocated at exact sizes and used again, step after step."""

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
        used: how much of it the activation takes.
        filled: when the copy into it has ended.
        read: when the last copy out of it has ended; None if there was none since it was filled.
        age: counts up with every buffer that is given back.
    """

    __slots__ = ("__weakref__", "age", "filled", "memory", "nbytes", "read", "used")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.nbytes = self.used = memory.nbytes
        self.filled: Event | None = None
        self.read: Event | None = None
        self.age = 0

    def view(self, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
        """Return the used memory as a tensor."""
        return self.memory[: self.used].view(dtype).as_strided(shape, stride)

    def __del__(self) -> None:
        # The memory goes now, and a device may still be at it.
        for event in (self.filled, self.read):
            if event is not None and not event.done():
                event.synchronize()


class HostBuffers:
    """A pool of buffers.

    Buffers are made at the exact size and go first to activations of that size. Batches of changing lengths would fill
    the host with sizes that do not come again, or, if these were freed, pin memory in every step. So an activation may
    also get a buffer of up to twice its size, and what is allocated, in use or idle, never exceeds the most bytes of
    buffers that were ever in use at once.

    Attributes:
        live: bytes of activations.
        in_use: bytes of the buffers that hold them.
        idle: bytes of buffers waiting to be used again.
        allocations: how many buffers were allocated so far.
    """

    def __init__(self) -> None:
        self.live = 0
        self.in_use = 0
        self.idle = 0
        self.allocations = 0
        self._most = 0
        self._ages = 0
        # Last in, first out: the buffer that was used last is the one whose memory is warm.
        self._stacks: dict[int, deque[HostBuffer]] = {}

    def get(self, nbytes: int, allocate: Callable[[int], Tensor]) -> HostBuffer:
        """Return a buffer for ``nbytes``, an idle one if one fits."""
        size = self._fitting(nbytes)
        buffer = self._new(nbytes, allocate) if size is None else self._take_out(size, self._stacks[size].pop)
        buffer.used = nbytes
        self.live += nbytes
        self.in_use += buffer.nbytes
        self._most = max(self._most, self.in_use)
        return buffer

    def give_back(self, buffer: HostBuffer) -> None:
        """Take back a buffer; copies into and out of it may still be under way."""
        self._ages += 1
        buffer.age = self._ages
        self._stacks.setdefault(buffer.nbytes, deque()).append(buffer)
        self.live -= buffer.used
        self.in_use -= buffer.nbytes
        self.idle += buffer.nbytes

    def _fitting(self, nbytes: int) -> int | None:
        """Return the size of idle buffers that waste least on ``nbytes``."""
        if nbytes in self._stacks:
            return nbytes
        return min((size for size in self._stacks if nbytes < size <= 2 * nbytes), default=None)

    def _new(self, nbytes: int, allocate: Callable[[int], Tensor]) -> HostBuffer:
        most = max(self._most, self.in_use + nbytes)
        while self._stacks and self.in_use + self.idle + nbytes > most:
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
