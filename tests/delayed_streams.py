"""A device's streams on the CPU, on which every copy runs as late as the program allows, or at random moments before.

What a device would get wrong sometimes is wrong here always, and wrong is NaN:
- the destination of a copy is NaN from when the copy is queued until somebody has waited for it;
- a copy reads its source when it runs, and holds it weakly: one that is gone by then, or was written by compute that
  the copy's stream has not waited for, gives NaN;
- a destination that another copy, not waited for, still reads is NaN to that one too.
The caller computes on the CPU in program order: its own work is always done, only the copies lag behind.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COMPUTE = 0


class Place:
    """Where a tensor lies, without keeping it there."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._like = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor | None:
        storage = self._storage()
        dtype, *where = self._like
        return None if storage is None else torch.empty(0, dtype=dtype).set_(storage, *where)

    def lies_with(self, other: Place) -> bool:
        storage = self._storage()
        return storage is not None and storage is other._storage()


def poison(tensor: Tensor | None) -> None:
    if tensor is not None:
        floating = tensor.is_floating_point() or tensor.is_complex()
        tensor.fill_(
            float("nan") if floating else True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max
        )


class Copy:
    """A queued copy: its source is read in one moment, its destination shows it when somebody waits."""

    def __init__(self, dst: Tensor, src: Tensor, stream: int, number: int, after: dict[int, int]) -> None:
        self.dst, self.src = Place(dst), Place(src)
        self.stream, self.number, self.after = stream, number, after
        self.value: Tensor | None = None  # what was read

    def comes_before(self, other: Copy) -> bool:
        return other.after.get(self.stream, 0) >= self.number


class DelayedEvent:
    def __init__(self, streams: DelayedStreams, stream: int, number: int, after: dict[int, int]) -> None:
        self._streams, self.stream, self.number, self.after = streams, stream, number, after

    def done(self) -> bool:
        done = self._streams.has_read(self)
        if done:
            self.synchronize()
        return done

    def synchronize(self) -> None:
        self._streams.finish(self)


class DelayedMark:
    """A moment that nobody measures."""

    def seconds_since(self, earlier: DelayedMark) -> float:
        return 0.0


class DelayedStream:
    """One queue. ``after`` says how much of every stream's work is known to come before what is queued next."""

    def __init__(self, streams: DelayedStreams, number: int) -> None:
        self._streams, self.number = streams, number
        self.after: dict[int, int] = {}
        self.queue: deque[Copy | DelayedEvent] = deque()  # what has not been read or waited for yet
        self.read: deque[Copy] = deque()  # what was read and not shown yet
        self.queued = 0

    def record(self) -> DelayedEvent:
        self._streams.at_random()
        number = self._streams.clock if self.number == COMPUTE else self.queued
        return DelayedEvent(self._streams, self.number, number, {**self.after, self.number: number})

    def wait(self, event: DelayedEvent) -> None:
        self._streams.at_random()
        if self.number == COMPUTE:
            event.synchronize()
        else:
            self.queue.append(event)
        for stream, number in event.after.items():
            self.after[stream] = max(number, self.after.get(stream, 0))

    def mark(self) -> DelayedMark:
        return DelayedMark()

    def copy(self, dst: Tensor, src: Tensor) -> None:
        self._streams.at_random()
        assert self.number != COMPUTE
        assert (dst.shape, dst.stride(), dst.dtype) == (src.shape, src.stride(), src.dtype)
        self.queued += 1
        copy = Copy(dst, src, self.number, self.queued, {**self.after, self.number: self.queued})
        self._streams.poison_destination(copy)
        self.queue.append(copy)

    def step(self) -> None:
        """Run what is queued first."""
        first = self.queue.popleft()
        if isinstance(first, DelayedEvent):
            self._streams.finish(first)
        else:
            self._streams.read(first)
            self.read.append(first)


class DelayedStreams(TorchDispatchMode):
    """All streams of one pretended device; as a context it watches which memory is written when.

    Args:
        seed: for the moments at which copies run; None: as late as possible.

    Attributes:
        clock: how many operations have computed.
        faults: what a device would have got wrong, in words.
        copies: how many copies were queued.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self._random = None if seed is None else random.Random(seed)
        self._streams = [DelayedStream(self, COMPUTE)]
        self._written: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._ours = False
        self.clock = 0
        self.faults: list[str] = []
        self.copies = 0

    # -- what a store sees ---------------------------------------------------------------------------------------------

    def compute(self) -> DelayedStream:
        self.at_random()
        return self._streams[COMPUTE]

    def new_stream(self) -> DelayedStream:
        self._streams.append(DelayedStream(self, len(self._streams)))
        return self._streams[-1]

    def pinned(self, nbytes: int) -> Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        with self._our_own():
            memory.fill_(255)  # NaN in any floating dtype
        return memory

    # -- copies --------------------------------------------------------------------------------------------------------

    def poison_destination(self, copy: Copy) -> None:
        self.copies += 1
        readers = [c for s in self._streams for c in s.queue if isinstance(c, Copy) and c.src.lies_with(copy.dst)]
        if any(not reader.comes_before(copy) for reader in readers):
            self.faults.append("a destination is still read by a copy that does not come before")
        elif readers:
            return  # they still need what is there
        with self._our_own():
            poison(copy.dst.tensor())

    def read(self, copy: Copy) -> None:
        with self._our_own():
            source, destination = copy.src.tensor(), copy.dst.tensor()
            for what, tensor in {"source": source, "destination": destination}.items():
                if tensor is None:
                    self.faults.append(f"the {what} of a copy was freed before it ran")
                elif self._clock_of(tensor) > copy.after.get(COMPUTE, 0):
                    self.faults.append(f"the {what} of a copy was written by compute that does not come before")
                else:
                    continue
                return  # what is not read is shown as NaN
            assert source is not None
            copy.value = source.clone()

    def show(self, copy: Copy) -> None:
        with self._our_own():
            destination = copy.dst.tensor()
            if copy.value is None:
                poison(destination)
            elif destination is not None:
                destination.copy_(copy.value)
            copy.value = None

    def finish(self, event: DelayedEvent) -> None:
        if event.stream == COMPUTE:
            return
        stream = self._streams[event.stream]
        while not self.has_read(event):
            stream.step()
        while stream.read and stream.read[0].number <= event.number:
            self.show(stream.read.popleft())

    def has_read(self, event: DelayedEvent) -> bool:
        if event.stream == COMPUTE:
            return True
        return all(c.number > event.number for c in self._streams[event.stream].queue if isinstance(c, Copy))

    def at_random(self) -> None:
        """Perhaps run something."""
        while self._random is not None and self._random.random() < 0.3:
            waiting = [stream for stream in self._streams if stream.queue]
            if not waiting:
                return
            self._random.choice(waiting).step()

    # -- compute -------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._ours:
            self.clock += 1
            returns = func._schema.returns
            results = [result] if len(returns) == 1 else result or []
            for what, value in zip(returns, results, strict=True):
                # A view shows memory and does not write it.
                if what.alias_info is None or what.alias_info.is_write:
                    self._note(value)
            self.at_random()
        return result

    def _note(self, value: Any) -> None:
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._written[storage._cdata] = weakref.ref(storage), self.clock

    def _clock_of(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        written = self._written.get(storage._cdata)
        return written[1] if written is not None and written[0]() is storage else 0

    @contextmanager
    def _our_own(self) -> Iterator[None]:
        ours, self._ours = self._ours, True
        try:
            yield
        finally:
            self._ours = ours
