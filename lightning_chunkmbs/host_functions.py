"""What moves tensors to the host and back, and their gradients the other way.

[Note: Functions come in pairs]
The backward of each Function below is its partner's forward: what was put on the host comes back from there, and the
other way round. Gradients are therefore hollow wherever values were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .host_tensor import HostTensor, Put


class _Stash(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, put: Put) -> HostTensor:
        ctx.set_materialize_grads(False)
        return HostTensor.put_away(y, put)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # Gradients are put away in the order of the chunks, and needed in that order.
        return None if grads[0] is None else load(grads[0], forward=True), None


class _Load(Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, put: Put, forward: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.put = put
        return h.load(forward=forward) if isinstance(h, HostTensor) else h.view_as(h)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None if grads[0] is None else stash(grads[0], ctx.put), None, None


class _Join(Function):
    @staticmethod
    def forward(ctx: Any, dim: int, *chunks: HostTensor) -> HostTensor:
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.sizes = dim, [chunk.shape[dim] for chunk in chunks]
        return HostTensor.cat(chunks, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:
            return None, *[None for _ in ctx.sizes]
        return None, *_pieces(grads[0], ctx.sizes, ctx.dim)


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, sizes: Sequence[int], dim: int) -> Any:
        ctx.set_materialize_grads(False)
        ctx.like, ctx.sizes, ctx.dim = (whole.shape, whole.dtype, whole.device), list(sizes), dim
        pieces = tuple(_pieces(whole, sizes, dim))
        ctx.hollow = isinstance(pieces[0], HostTensor)
        return pieces

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _put_together(grads, ctx), None, None


def stash(y: Tensor, put: Put) -> HostTensor:
    """Move ``y`` (any shape and dtype) to the host; its gradient comes from there, on the device.

    A HostTensor is returned as it is.
    """
    return y if isinstance(y, HostTensor) else _Stash.apply(y, put)


def load(h: Tensor, put: Put | None = None, *, forward: bool = False) -> Tensor:
    """Return ``h`` as a plain device tensor, while ``h`` stays hollow; its gradient is put on the host.

    Args:
        h: any tensor; one that is no HostTensor is returned as it is.
        put: moves gradients of a tensor that is no HostTensor; by default they stay on the device.
        forward: the next to be loaded is what was put away next, and not what was put away before.
    """
    put = h.put_fn if isinstance(h, HostTensor) else put
    return h if put is None else _Load.apply(h, put, forward)


def join(chunks: Sequence[HostTensor], dim: int) -> HostTensor:
    """Return one HostTensor of all ``chunks`` along ``dim``, without loading them.

    A gradient on the host in parts of the same sizes is handed on part by part; another one is cut on the device.
    """
    return _Join.apply(dim, *chunks)


def split(whole: Tensor, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    """Return chunks of ``whole``, as ``torch.split`` does.

    Chunks of an untouched HostTensor with parts of these sizes are its parts, and so are the parts of its gradient.
    Otherwise they are views on the device, and their gradients are written into one tensor, one after the other.
    """
    return _Split.apply(whole, sizes, dim)


@torch.no_grad()
def grad_to_host(g: Tensor, sizes: Sequence[int], dim: int, put: Put) -> HostTensor:
    """Move the gradient ``g`` of a whole to the host, in parts of ``sizes`` along ``dim``."""
    if isinstance(g, HostTensor) and g.is_cut(sizes, dim):
        return g
    return HostTensor.cat([HostTensor.put_away(piece, put) for piece in g.split(list(sizes), dim)], dim)


def _pieces(whole: Tensor, sizes: Sequence[int], dim: int) -> Sequence[Tensor]:
    """Return ``whole`` in pieces: its parts on the host if they have these sizes, else views."""
    differentiable = torch.is_grad_enabled() and whole.requires_grad
    if isinstance(whole, HostTensor) and whole.is_cut(sizes, dim) and not differentiable:
        return whole.pieces()
    return whole.split(list(sizes), dim)


def _put_together(grads: Sequence[Tensor | None], ctx: Any) -> Tensor | None:
    """Return the gradient of a whole from those of its chunks; chunks without one count as zeros."""
    shape, dtype, device = ctx.like
    if all(g is None for g in grads):
        return None
    if ctx.hollow and all(isinstance(g, HostTensor) for g in grads) and not torch.is_grad_enabled():
        return HostTensor.cat(grads, ctx.dim)  # type: ignore[arg-type]
    whole = torch.empty(shape, dtype=dtype, device=device)
    places = whole.split(ctx.sizes, ctx.dim)
    if torch.is_grad_enabled():  # a second derivative is wanted
        dense = [torch.zeros_like(p) if g is None else load(g) for g, p in zip(grads, places, strict=True)]
        return torch.cat(dense, ctx.dim)
    for g, place in zip(grads, places, strict=True):
        if g is None:
            place.zero_()
        elif isinstance(g, HostTensor):
            g.pour(place)
        else:
            place.copy_(g)
    return whole
