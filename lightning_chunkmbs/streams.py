"""Copy streams, events and pinned memory of any accelerator, and a twin for devices without streams.

Nothing here decides an order: the activation store says what waits for what, and a test puts a backend of its own in
this one's place to see whether it said enough.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in the work of a stream."""

    def done(self) -> bool:
        """Return whether all work before this point has ended; never waits."""

    def synchronize(self) -> None:
        """Keep the host until all work before this point has ended."""


class Mark(Protocol):
    """A moment in the work of a stream, to be compared with others on the same device."""

    def seconds_since(self, earlier: Any) -> float | None:
        """Return how much later than ``earlier`` it was, below 0 if before; None while either is to come."""


class Stream(Protocol):
    """A queue of work on a device; two objects for the same queue are equal."""

    def record(self) -> Event:
        """Return the point after all work queued so far."""

    def wait(self, event: Any) -> None:
        """Let work queued from now on start after ``event``; the host does not wait."""

    def mark(self) -> Mark:
        """Return the moment at which the work queued so far ends."""

    def copy(self, dst: Tensor, src: Tensor) -> None:
        """Queue a copy of ``src`` into ``dst``, both dense and of one shape, stride and dtype."""


class Streams(Protocol):
    """The streams of one device and the host memory that its copies are fast with."""

    def compute(self) -> Stream:
        """Return the stream on which the caller computes now. Another thread or context may have another."""

    def new_stream(self) -> Stream:
        """Return a stream of one's own."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return new host memory (uint8, ``[nbytes]``) that the device copies to and from without the host's help.

        Raises:
            RuntimeError: the memory cannot be had or cannot be pinned.
        """


def streams_for(device: torch.device) -> Streams:
    """Return the streams of ``device``; for one that has none, copies that run at once."""
    if device.type in ("cpu", "meta"):
        return HostStreams()
    module = torch.get_device_module(device)
    return DeviceStreams(module, device) if hasattr(module, "Stream") else HostStreams()


# -- an accelerator --------------------------------------------------------------------------------------------------


class _DeviceEvent:
    __slots__ = ("event",)

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()


class _DeviceMark:
    __slots__ = ("event",)

    def __init__(self, event: Any) -> None:
        self.event = event

    def seconds_since(self, earlier: _DeviceMark) -> float | None:
        if not (earlier.event.query() and self.event.query()):
            return None
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class _DeviceStream:
    __slots__ = ("_module", "_stream")

    def __init__(self, module: Any, stream: Any) -> None:
        self._module = module
        self._stream = stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _DeviceStream) and bool(self._stream == other._stream)

    def record(self) -> _DeviceEvent:
        return _DeviceEvent(self._stream.record_event())

    def wait(self, event: _DeviceEvent) -> None:
        self._stream.wait_event(event.event)

    def mark(self) -> _DeviceMark:
        return _DeviceMark(self._stream.record_event(self._module.Event(enable_timing=True)))

    def copy(self, dst: Tensor, src: Tensor) -> None:
        with self._module.stream(self._stream):
            dst.copy_(src, non_blocking=True)


class DeviceStreams:
    """Streams of an accelerator.

    Args:
        module: torch's module for the device (``torch.cuda``, ``torch.xpu``, ``torch.npu``).
        device: the device.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._device = device

    def compute(self) -> _DeviceStream:
        return _DeviceStream(self._module, self._module.current_stream(self._device))

    def new_stream(self) -> _DeviceStream:
        return _DeviceStream(self._module, self._module.Stream(device=self._device))

    def pinned(self, nbytes: int) -> Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if self._device.type == "cuda":
            register(memory, self._module.cudart(), self._device)
            return memory
        return memory.pin_memory()


def register(memory: Tensor, cudart: Any, device: torch.device) -> None:
    """Pin ``memory`` where it lies, for as long as it lives.

    torch's own pinned allocator rounds sizes up to powers of two, which would double the memory in the worst case.

    Raises:
        RuntimeError: CUDA refuses, as it does where a container limits locked memory.
    """
    pointer, portable = memory.data_ptr(), 1
    error = cudart.cudaHostRegister(pointer, memory.nbytes, portable)
    if int(error) != 0:
        _forget_error(device)
        raise RuntimeError(f"cudaHostRegister of {memory.nbytes} bytes: {cudart.cudaGetErrorString(error)}")
    # The pages stay pinned after they are freed unless they are unregistered before. At exit the driver does it.
    weakref.finalize(memory, cudart.cudaHostUnregister, pointer).atexit = False


def _forget_error(device: torch.device) -> None:
    """Take back CUDA's note of its last error, which the next kernel launch would report as its own."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


# -- no accelerator --------------------------------------------------------------------------------------------------


class _Done:
    """The event of work that ran at once."""

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _Now:
    """The moment of work that takes no time of its own: nobody ever waits for it."""

    def seconds_since(self, earlier: _Now) -> float:
        return 0.0


class _HostStream:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HostStream)

    def record(self) -> _Done:
        return _Done()

    def wait(self, event: _Done) -> None:
        pass

    def mark(self) -> _Now:
        return _Now()

    def copy(self, dst: Tensor, src: Tensor) -> None:
        dst.copy_(src)


class HostStreams:
    """Streams whose work is done when it is queued: all is in order by itself."""

    def compute(self) -> _HostStream:
        return _HostStream()

    def new_stream(self) -> _HostStream:
        return _HostStream()

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
