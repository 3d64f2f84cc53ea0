"""What a program is told that asks tensors without values: of each number that it is 1, and what follows from that.

[Note: what is told]
A comparison with a number is what it would be for ones, so a loss is neither NaN nor infinite and a count not zero;
what is made of it by ``any``, ``not``, ``and`` and ``or`` follows. Of many integers some equal a certain one, and not
all. What was made from a number of the program, or as zeros, is that. Where the size of a result depends on values,
every mask selects everything and all values differ: memory is planned for, and that is the most there may be.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__: list[str] = []

_aten = torch.ops.aten


_FALSE = "_chunkmbs_false"  # an attribute of tensors that are known to be all zeros or False
_MIXED = "_chunkmbs_mixed"  # an attribute of masks of which some elements are True, and not all


def _packets(names: str) -> set[Any]:
    return {getattr(_aten, name) for name in names.split()}


_NEVER = _packets("isnan isinf isposinf isneginf zeros zeros_like new_zeros")
_FULL = _packets("full full_like new_full scalar_tensor")
_NOT = _packets("bitwise_not logical_not")
_AND = _packets("bitwise_and logical_and mul")
_ALL = _packets("all")
_OR = _packets("bitwise_or logical_or any sum mean amax amin max min prod count_nonzero abs add cat stack")
_OR |= _packets("_to_copy clone detach alias view _unsafe_view permute t unsqueeze squeeze select slice expand index")
_COMPARISONS = {getattr(_aten, name): getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_KNOWN = {*_COMPARISONS} | _NEVER | _FULL | _NOT | _AND | _ALL | _OR


def value_of(tensor: Tensor) -> bool | int | float:
    """Return what a program is told that asks for the value of a tensor of one element."""
    told = not hasattr(tensor, _FALSE)
    if tensor.dtype is torch.bool:
        return told
    return float(told) if tensor.dtype.is_floating_point else int(told)


def note_value(func: Any, args: Any, result: Any) -> None:
    """Note of a result whether it is known to be zero or False."""
    if not isinstance(result, Tensor):
        return
    packet, mutable = func._overloadpacket, func._schema.is_mutable
    if packet not in _KNOWN and not mutable:
        return
    inputs = [x for x in (args[0] if args and isinstance(args[0], (list, tuple)) else args) if isinstance(x, Tensor)]
    mixed = any(hasattr(x, _MIXED) for x in inputs)
    # Which of many integers are a certain one nobody knows: some are, and not all (a mask of labels).
    masks = packet in (_aten.eq, _aten.ne) and isinstance(args[1], int) and inputs[0].numel() > 1
    _mark(result, _FALSE, not mutable and not masks and _is_false(packet, args, inputs, mixed))
    _mark(result, _MIXED, masks or (mixed and packet in _NOT | _AND))


def _is_false(packet: Any, args: Any, inputs: list[Tensor], mixed: bool) -> bool:
    false = [hasattr(x, _FALSE) for x in inputs]
    if packet in _COMPARISONS:
        left, *right = [0 if zero else 1 for zero in false]
        other = right[0] if right else args[1]
        return not _COMPARISONS[packet](left, other)
    if packet in _FULL:
        return next((not x for x in args[::-1] if isinstance(x, (bool, int, float))), False)
    if packet in _NOT:
        return not mixed and not any(false)
    if packet in _AND:
        return any(false)
    return packet in _NEVER or (bool(false) and all(false)) or (packet in _ALL and mixed)


def _mark(tensor: Tensor, mark: str, on: bool) -> None:
    if on:
        setattr(tensor, mark, True)
    elif hasattr(tensor, mark):
        delattr(tensor, mark)


class Answers(TorchFunctionMode):
    """Mode in which tensors without values can be printed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__format__:
            return format(args[0].item(), args[1]) if args[0].ndim == 0 else "..."
        return func(*args, **(kwargs or {}))


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
