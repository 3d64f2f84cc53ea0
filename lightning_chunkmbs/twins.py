"""A copy of a module without its memory, to try things on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__: list[str] = []

_Module = TypeVar("_Module", bound=nn.Module)


def twin_of(module: _Module, left_out: list[Any]) -> _Module:
    """Return a copy of a module, parameters and buffers on the meta device and all other tensors zeros on the CPU.

    Args:
        module: what is copied; parameters that are tied stay tied.
        left_out: objects that the copy has None for, wherever the module refers to them (its Trainer).

    Raises:
        RuntimeError: something that the module holds cannot be copied.
    """

    def memo() -> dict[int, Any]:
        return {id(one): None for one in left_out} | {id(t): _empty(t) for t in _tensors(module)}

    with _Zeros():
        try:
            return copy.deepcopy(module, memo())
        except Exception:
            # Something belongs to the process (a lock, a connection, a generator): the copy uses the same one.
            return copy.deepcopy(module, memo() | dict(_not_copied(module, memo)))


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _empty(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if not isinstance(tensor, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)  # marks by which optimizers group parameters
    return parameter


def _not_copied(module: nn.Module, memo: Any) -> Iterator[tuple[int, Any]]:
    """Every attribute that cannot be copied, by its id."""
    own = {"_parameters", "_buffers", "_modules"}
    for inner in module.modules():
        for name, value in vars(inner).items():
            if name in own:
                continue
            try:
                copy.deepcopy(value, memo())
            except Exception:
                yield id(value), value


class _Zeros(TorchFunctionMode):
    """Copies of tensors are zeros on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        made = memo[id(tensor)] = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        return made
