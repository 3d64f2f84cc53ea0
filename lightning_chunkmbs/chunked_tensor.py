"""A batch that stays cut between blocks.

[Note: one buffer, and the graph in pieces]
The chunks of a block's output are written into one buffer as they are computed. The buffer is the batch: an ordinary
tensor for whatever code comes next, which needs no joining. The graph behind it stays in pieces: a block that is given
the batch unchanged takes the chunks themselves, so in backward gradients travel chunk by chunk, and each is freed when
it has been used. Only where a batch enters its first block, and where the code after the last block takes it, does a
gradient of the whole batch exist; the former is written into one buffer too.

[Note: aliases]
The Functions here return ``detach()`` of what they are given: the same memory and the same version counter, so that
nothing written in place goes unnoticed, and yet no view, so that code between blocks may write in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.utils.weak import WeakTensorKeyDictionary

from .host_functions import split
from .host_tensor import HostTensor

# Brings a piece back into the graph of its batch, behind whatever saw all pieces at once.
Rejoin = Callable[[int, Tensor], Tensor]


class Assembly:
    """One batch tensor of a block's output, put together chunk by chunk.

    Args:
        sizes: samples of each chunk.
        dim: batch dimension.
    """

    def __init__(self, sizes: Sequence[int], dim: int) -> None:
        self.sizes, self.dim = tuple(sizes), dim
        self._buffer: Tensor | None = None
        self._slots: list[Tensor] = []

    def fits(self, value: Tensor) -> bool:
        """Return whether a chunk has dtype, device and (but for the batch) shape of the chunks before it."""
        if self._buffer is None:
            return True
        like, other = list(self._buffer.shape), list(value.shape)
        like[self.dim] = other[self.dim] = 0
        return like == other and (value.dtype, value.device) == (self._buffer.dtype, self._buffer.device)

    def place(self, i: int, value: Tensor) -> Tensor:
        """Write chunk ``i`` to its place and return it from there; the memory of ``value`` is free to go."""
        if self._buffer is None:
            shape = list(value.shape)
            shape[self.dim] = sum(self.sizes)
            self._buffer = torch.empty(shape, dtype=value.dtype, device=value.device, memory_format=_format(value))
            self._slots = list(self._buffer.split(self.sizes, self.dim))
        placed: Tensor = _Place.apply(value, self._slots[i])
        return placed

    def whole(self, chunks: Sequence[Tensor]) -> Tensor:
        """Return the batch, of which ``chunks`` are the parts.

        What FSDP2 did to the chunks since (a cast of outputs) is joined anew.
        """
        if self._buffer is None or any(not _same_memory(c, s) for c, s in zip(chunks, self._slots, strict=True)):
            return torch.cat(list(chunks), self.dim)
        whole: Tensor = _Whole.apply(self._buffer, self.sizes, self.dim, *chunks)
        return whole


def _format(value: Tensor) -> torch.memory_format:
    """The memory format that ``torch.cat`` keeps."""
    if value.ndim == 4 and not value.is_contiguous() and value.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype


class _Place(Function):
    """Copies a chunk to its place in the batch."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, slot: Tensor) -> Tensor:
        slot.copy_(value)
        return slot.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _Whole(Function):
    """The batch that its chunks, already in place, make up."""

    @staticmethod
    def forward(ctx: Any, buffer: Tensor, sizes: tuple[int, ...], dim: int, *chunks: Tensor) -> Tensor:
        ctx.sizes, ctx.dim = sizes, dim
        return buffer.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, *grads[0].split(ctx.sizes, ctx.dim)


class _Cut(NamedTuple):
    dim: int
    chunks: tuple[Tensor, ...]
    version: int


class Cuts:
    """The batches of one model that blocks returned, and their chunks."""

    def __init__(self) -> None:
        # By the batch and as long as it lives.
        self._cuts: Any = WeakTensorKeyDictionary()

    def remember(self, whole: Tensor, dim: int, chunks: Sequence[Tensor]) -> None:
        """Note the chunks of a batch."""
        self._cuts[whole] = _Cut(dim, tuple(chunks), whole._version)

    def cut(self, whole: Tensor, sizes: tuple[int, ...], dim: int) -> tuple[tuple[Tensor, ...], Rejoin | None]:
        """Cut a batch along ``dim`` into pieces of ``sizes``.

        Returns:
            The pieces, and what each of them passes through before it is used (see :data:`Rejoin`).
        """
        known = self._known(whole, sizes, dim)
        if known is not None:
            return known, None
        if isinstance(whole, HostTensor) and whole.is_cut(sizes, dim):
            return split(whole, sizes, dim), None
        if not (torch.is_grad_enabled() and whole.requires_grad):
            return whole.split(sizes, dim), None
        gradient = _Gradient(whole, sizes, dim)
        return _Split.apply(whole, gradient), gradient.rejoin

    def _known(self, whole: Tensor, sizes: tuple[int, ...], dim: int) -> tuple[Tensor, ...] | None:
        """The chunks of which a block made ``whole``, if it is still what it was and would be cut the same way."""
        cut: _Cut | None = self._cuts.get(whole)
        if cut is None or cut.dim != dim or tuple(c.size(dim) for c in cut.chunks) != sizes:
            return None
        if whole._version != cut.version or whole.requires_grad != cut.chunks[0].requires_grad:
            return None
        if whole.requires_grad and (whole._backward_hooks or whole.retains_grad):
            return None  # these belong to the batch, which the chunks would leave out
        return cut.chunks


class _Gradient:
    """Gradient of a batch that is cut where it enters its first block; each chunk writes its part."""

    def __init__(self, whole: Tensor, sizes: tuple[int, ...], dim: int) -> None:
        self.shape, self.device, self.sizes, self.dim = whole.shape, whole.device, sizes, dim
        self._slots: list[Tensor] = []
        self._buffer: Tensor | None = None

    def rejoin(self, i: int, piece: Tensor) -> Tensor:
        deposited: Tensor = _Deposit.apply(piece, self, i)
        return deposited

    def put(self, i: int, grad: Tensor) -> Tensor:
        """Write the gradient of piece ``i`` to its place and return it from there."""
        if self._buffer is None:
            self._buffer = torch.empty(self.shape, dtype=grad.dtype, device=self.device)
            self._slots = list(self._buffer.split(self.sizes, self.dim))
        return self._slots[i].copy_(grad)

    def take(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Return the gradient of the batch; ``grads`` are those of its pieces, most of them in place already."""
        given = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
        for i, grad in given:
            if self._buffer is None or not _same_memory(grad, self._slots[i]):
                self.put(i, grad)
        for i in {*range(len(grads))} - {i for i, _ in given} if given else ():
            self._slots[i].zero_()
        buffer, self._buffer, self._slots = self._buffer, None, []
        return buffer


class _Split(Function):
    """Cuts a batch, and returns its gradient from one buffer and not from a list of parts."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, gradient: _Gradient) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gradient = gradient
        return tuple(piece.detach() for piece in whole.split(gradient.sizes, gradient.dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return ctx.gradient.take(grads), None


class _Deposit(Function):
    """Writes the gradient of one piece into the gradient of its batch."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, gradient: _Gradient, i: int) -> Tensor:
        ctx.gradient, ctx.i = gradient, i
        return piece.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.gradient.put(ctx.i, grads[0]), None, None
