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

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.utils.weak import WeakTensorKeyDictionary

from .arguments import Rejoin
from .host_functions import split
from .host_tensor import HostTensor


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
        self._whole: Callable[[], Tensor | None] = lambda: None
        self.taken = False  # a later block has taken the chunks in place of the batch

    def check_hooks(self) -> None:
        """Refuse hooks that were set on the batch after its chunks had been taken.

        Raises:
            RuntimeError: there is one, or its gradient is to be retained.
        """
        whole = self._whole() if self.taken else None
        if whole is not None:
            refuse_late_hooks(whole)

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
        placed: Tensor = _Place.apply(value, self._slots[i], self)
        return placed

    def whole(self, chunks: Sequence[Tensor]) -> Tensor:
        """Return the batch, of which ``chunks`` are the parts.

        What FSDP2 did to the chunks since (a cast of outputs) is joined anew.
        """
        if self._buffer is None or any(not _same_memory(c, s) for c, s in zip(chunks, self._slots, strict=True)):
            return torch.cat(list(chunks), self.dim)
        whole: Tensor = _Whole.apply(self._buffer, self.sizes, self.dim, *chunks)
        self._whole = weakref.ref(whole)
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
    def forward(ctx: Any, value: Tensor, slot: Tensor, assembly: Assembly) -> Tensor:
        ctx.check_hooks = weakref.WeakMethod(assembly.check_hooks)
        slot.copy_(value)
        return slot.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        check_hooks = ctx.check_hooks()
        if check_hooks is not None:
            check_hooks()
        return grads[0], None, None


def same_values(tensor: Tensor, alias: Tensor) -> bool:
    """Return whether a tensor still shows the memory of its alias (it may be given another through ``.data``)."""
    if isinstance(tensor, HostTensor) or isinstance(alias, HostTensor):
        return isinstance(tensor, HostTensor) and tensor.same_values(alias)
    return tensor.data_ptr() == alias.data_ptr()


def refuse_late_hooks(tensor: Tensor) -> None:
    """Refuse a hook on a tensor whose gradient will not be computed.

    Raises:
        RuntimeError: there is one, or its gradient is to be retained.
    """
    if tensor._backward_hooks or tensor.retains_grad:
        raise RuntimeError(
            f"A hidden state of shape {tuple(tensor.shape)} got register_hook() or retain_grad() after the next block "
            f"had taken it in pieces, so it has no gradient of its own. Call them before the next block runs."
        )


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
    alias: Tensor
    assembly: Assembly | None


class Cuts:
    """The batches of one model that blocks returned, and their chunks."""

    def __init__(self) -> None:
        # By the batch and as long as it lives.
        self._cuts: Any = WeakTensorKeyDictionary()

    def remember(self, whole: Tensor, dim: int, chunks: Sequence[Tensor], assembly: Assembly | None = None) -> None:
        """Note the chunks of a batch, and what put it together."""
        self._cuts[whole] = _Cut(dim, tuple(chunks), whole._version, whole.detach(), assembly)

    def cut(self, whole: Tensor, sizes: tuple[int, ...], dim: int | None) -> tuple[tuple[Tensor, ...], Rejoin | None]:
        """Cut a batch along ``dim`` into pieces of ``sizes``; without ``dim`` all chunks share it.

        Returns:
            The pieces, and what each of them passes through before it is used (see :data:`~.arguments.Cut`).
        """
        if dim is None:
            return self._share(whole)
        known = self._known(whole, sizes, dim)
        if known is not None:
            return known, None
        if isinstance(whole, HostTensor) and whole.is_cut(sizes, dim):
            return split(whole, sizes, dim), None
        if not (torch.is_grad_enabled() and whole.requires_grad):
            return whole.split(sizes, dim), None
        gradient = _Gradient(whole, sizes, dim)
        return _Split.apply(whole, gradient), gradient.rejoin

    def _share(self, tensor: Tensor) -> tuple[tuple[Tensor, ...], Rejoin | None]:
        """Hand one tensor to all chunks; gradients of chunks are added up in fp32 where it has less."""
        if not (torch.is_grad_enabled() and tensor.requires_grad and tensor.dtype.itemsize < 4):
            return (tensor,), None
        total = _Total(tensor.dtype)
        return (_Shared.apply(tensor, total),), total.rejoin

    def _known(self, whole: Tensor, sizes: tuple[int, ...], dim: int) -> tuple[Tensor, ...] | None:
        """The chunks of which a block made ``whole``, if it is still what it was and would be cut the same way."""
        cut: _Cut | None = self._cuts.get(whole)
        if cut is None or cut.dim != dim or tuple(c.size(dim) for c in cut.chunks) != sizes:
            return None
        if not same_values(whole, cut.alias):
            return None
        if whole._version != cut.version or whole.requires_grad != cut.chunks[0].requires_grad:
            return None
        if whole.requires_grad and (whole._backward_hooks or whole.retains_grad):
            return None  # these belong to the batch, which the chunks would leave out
        if cut.assembly is not None:
            cut.assembly.taken = True
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


class _Total:
    """Gradient of a tensor that all chunks share, added up in fp32: autograd would add in the tensor's own dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._sum: Tensor | None = None

    def rejoin(self, _i: int, tensor: Tensor) -> Tensor:
        added: Tensor = _AddUp.apply(tensor, self)
        return added

    def add(self, grad: Tensor) -> None:
        grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
        self._sum = grad.clone() if self._sum is None else self._sum.add_(grad)

    def take(self) -> Tensor | None:
        total, self._sum = self._sum, None
        return None if total is None else total.to(self._dtype)


class _Shared(Function):
    """Where a shared tensor enters the block: its gradient is what its uses have added up."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, total: _Total) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.total = total
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return ctx.total.take(), None


class _AddUp(Function):
    """Where one chunk uses a shared tensor; its gradient goes no further than to the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, total: _Total) -> Tensor:
        ctx.total = total
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.total.add(grads[0])
        return None, None
