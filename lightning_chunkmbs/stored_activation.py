"""One activation out of the graph: where it is, and what must not be let go of while a copy runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

from torch import Tensor

from .host_buffers import HostBuffer
from .streams import Event, Stream


class Held:
    """A tensor on the device, held until a copy from or to it has ended.

    Attributes:
        tensor: the tensor; None once it has been released.
        done: when the copy has ended; None if none runs.
        owner: the stream in whose order the tensor's memory is used again.
    """

    __slots__ = ("_changed", "_version", "done", "owner", "tensor")

    def __init__(self, tensor: Tensor, done: Event | None = None, owner: Stream | None = None) -> None:
        self.tensor: Tensor | None = tensor
        self.done = done
        self.owner = owner
        self._version = version(tensor)
        self._changed = False

    def release(self) -> None:
        """Let go of the tensor, whose memory is then used again only after the copy; the second time do nothing."""
        self._changed = self.changed
        tensor, self.tensor = self.tensor, None
        if tensor is not None and self.owner is not None and self.done is not None:
            self.owner.wait(self.done)

    @property
    def ended(self) -> bool:
        """Whether nothing is held any more, or need be."""
        return self.tensor is None or (self.done is not None and self.done.done())

    @property
    def changed(self) -> bool:
        """Whether the tensor was written while it was held."""
        return self._changed if self.tensor is None else version(self.tensor) != self._version


class StoredActivation:
    """One activation, on the host or kept on the device. It lives exactly as long as the graph that needs it.

    Args:
        tensor: the activation, dense.
        take: brings it back.
        give_back: receives the host buffer when the activation is gone; called wherever Python collects it.

    Attributes:
        shape: its shape.
        stride: its strides.
        dtype: its dtype.
        device: the device it came from and goes back to.
        nbytes: its size.
        companion: it is taken after another one, with which it was put.
        buffer: its host memory; None if it was kept on the device.
        held: the source of the copy out, or what was kept on the device.
        loading: what a copy back is writing or has written, and nobody has taken yet.
        written: what is kept may be written by those who take it, so each gets a copy.
    """

    __slots__ = (
        "__weakref__",
        "_after",
        "_before",
        "_beside",
        "_give_back",
        "_take",
        "buffer",
        "companion",
        "device",
        "dtype",
        "held",
        "loading",
        "nbytes",
        "shape",
        "stride",
        "written",
    )

    def __init__(self, tensor: Tensor, take: Callable[..., Tensor], give_back: Callable[[HostBuffer], object]) -> None:
        self._take = take
        self._give_back = give_back
        self._before: Callable[[], StoredActivation | None] = _nobody
        self._after: Callable[[], StoredActivation | None] = _nobody
        self._beside: list[weakref.ref[StoredActivation]] = []
        self.companion = False
        self.buffer: HostBuffer | None = None
        self.held: Held | None = None
        self.loading: Held | None = None
        self.written = False
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.dtype, self.device = tensor.dtype, tensor.device
        self.nbytes = tensor.numel() * tensor.element_size()

    def load(self, *, forward: bool = False) -> Tensor:
        """Return the activation on its device; see :meth:`ActivationStore.take`."""
        return self._take(self, forward=forward)

    def host(self) -> Tensor:
        """Return its host memory as a tensor like the activation."""
        assert self.buffer is not None
        return self.buffer.view(self.dtype, self.shape, self.stride)

    def follow(self, last: StoredActivation | None) -> None:
        """Note that this activation was put after ``last``."""
        if last is not None:
            self._before = weakref.ref(last)
            last._after = weakref.ref(self)

    def accompany(self, last: StoredActivation | None) -> None:
        """Note that this activation is taken after ``last``, and before those put before or after that one."""
        self.companion = True
        if last is not None:
            last._beside.append(weakref.ref(self))

    def companions(self) -> list[StoredActivation]:
        """Return those taken after this one and put with it, in order, that still live."""
        return [companion for ref in self._beside if (companion := ref()) is not None]

    def neighbours(self, forward: bool) -> Iterator[StoredActivation]:
        """Yield those put before this one that still live, latest first, or those put after it."""
        neighbour = self._after() if forward else self._before()
        while neighbour is not None:
            yield neighbour
            neighbour = neighbour._after() if forward else neighbour._before()

    def check_unchanged(self) -> None:
        """Refuse to give back what was written while it was needed.

        Raises:
            RuntimeError: it was written in place while it was copied, or while it was kept.
        """
        if self.held is not None and self.held.changed:
            raise RuntimeError(
                f"The input of a block must stay as it is until it is on the host, or is recomputed if it stays on the "
                f"device; one of shape {list(self.shape)} on {self.device} was modified by an inplace operation. "
                f"Write out of place what changes it after the block has taken it, for example x = x + y for x += y."
            )

    def __del__(self) -> None:
        before, after = self._before(), self._after()
        if before is not None:
            before._after = self._after
        if after is not None:
            after._before = self._before
        for held in (self.held, self.loading):
            if held is not None:
                held.release()
        if self.buffer is not None:
            self._give_back(self.buffer)


def _nobody() -> None:
    return None


def version(tensor: Tensor) -> int:
    """Return a number that changes when ``tensor`` is written in place."""
    return 0 if tensor.is_inference() else tensor._version
