"""Operations that make as much as values say, on tensors without values: every mask selects all, all values differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []

_aten = torch.ops.aten


def answer_for(func: Any) -> Callable[..., Any] | None:
    """Return what stands for ``func``, an operator of torch; None: its results' sizes do not depend on values."""
    return _ANSWERS.get(func)


def _ints(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int64)


def _nonzero(x: Tensor) -> Tensor:
    return _ints(x, x.numel(), x.ndim)


def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    return x.new_empty(torch.broadcast_shapes(x.shape, mask.shape).numel())


def _index(x: Tensor, indices: list[Tensor | None]) -> Tensor:
    known: list[Tensor | None] = []
    for index in indices:
        masks = index is not None and index.dtype in (torch.bool, torch.uint8)
        # One index for each dimension of a mask.
        known += [_ints(x, index.numel()) for _ in index.shape] if masks and index is not None else [index]
    result: Tensor = _aten.index.Tensor(x, known)
    return result


def _unique(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.numel()), _ints(x, *x.shape), _ints(x, x.numel())


def _unique_dim(x: Tensor, dim: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), _ints(x, x.shape[dim]), _ints(x, x.shape[dim])


def _unique_consecutive(
    x: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return _unique(x) if dim is None else _unique_dim(x, dim)


def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    return _ints(x, max(2, minlength)) if weights is None else weights.new_empty(max(2, minlength))


def _repeat_interleave(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    return _ints(repeats, repeats.numel() if output_size is None else output_size)


def _true(*_: Any, **__: Any) -> bool:
    return True


_ANSWERS: dict[Any, Callable[..., Any]] = {
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten.index.Tensor: _index,
    _aten._unique2.default: _unique,
    _aten.unique_dim.default: _unique_dim,
    _aten.unique_consecutive.default: _unique_consecutive,
    _aten.bincount.default: _bincount,
    _aten.repeat_interleave.Tensor: _repeat_interleave,
    _aten.equal.default: _true,
    _aten.allclose.default: _true,
}
