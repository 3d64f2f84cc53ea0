"""A copy of a module without its memory, to try things on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
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
        large = {id(value): value for value in _large(module)}
        return {id(one): None for one in left_out} | large | {id(t): _empty(t) for t in _tensors(module)}

    with _Zeros():
        try:
            return copy.deepcopy(module, memo())
        except Exception:
            # Something belongs to the process (a lock, a connection, a generator): the copy uses the same one.
            return copy.deepcopy(module, memo() | dict(_not_copied(module, memo)))


def bring_up_to_date(twin: nn.Module, module: nn.Module) -> None:
    """Give ``twin`` what has been set on ``module`` since it was copied: attributes, modes, what is frozen.

    Args:
        twin: a copy of the module.
        module: the module, whose parameters may have been sharded since.
    """
    twins = dict(twin.named_modules(remove_duplicate=False))
    live = {name: inner for name, inner in module.named_modules(remove_duplicate=False) if name in twins}
    trained = {name: p.requires_grad for name, p in module.named_parameters(remove_duplicate=False)}
    for name, p in twin.named_parameters(remove_duplicate=False):
        p.requires_grad_(trained.get(name, p.requires_grad))
    memo = {id(inner): twins[name] for name, inner in live.items()}
    with _Zeros():
        for name, inner in live.items():
            for key, value in vars(inner).items():
                if _is_news(key, value, twins[name].__dict__):
                    with suppress(Exception):  # what cannot be copied stays what it was
                        twins[name].__dict__[key] = copy.deepcopy(value, memo)


def _is_news(key: str, value: Any, before: dict[str, Any]) -> bool:
    """Whether an attribute is new, or a plain value that has changed; the strategy's own and functions are not."""
    if key.startswith(("_chunkmbs", "_forward", "_backward", "_state_dict", "_load_state")) or callable(value):
        return False
    plain = isinstance(value, (bool, int, float, str, type(None)))
    return key not in before or (plain and before[key] is not value)


def _large(module: nn.Module) -> Iterator[Any]:
    """Arrays that are attributes of modules: data, which nobody writes to in a step."""
    for inner in module.modules():
        for value in vars(inner).values():
            if not isinstance(value, (Tensor, nn.Module)) and isinstance(getattr(value, "nbytes", None), int):
                yield value


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


def _not_copied(module: nn.Module, memo: Callable[[], dict[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Every attribute that cannot be copied, by its id."""
    own = {"_parameters", "_buffers", "_modules"}
    for inner in module.modules():
        for name, value in vars(inner).items():
            if name in own:
                continue
            yield from _shared(value, memo)


def _shared(value: Any, memo: Callable[[], dict[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Yield a value that cannot be copied, or of a container what in it cannot be."""
    try:
        copy.deepcopy(value, memo())
    except Exception:
        if type(value) in (dict, list, tuple):
            for one in value.values() if isinstance(value, dict) else value:
                yield from _shared(one, memo)
        else:
            yield id(value), value


class _Zeros(TorchFunctionMode):
    """Copies of tensors are zeros on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (Tensor.__deepcopy__, Tensor.clone):  # parameters are cloned
            return func(*args, **(kwargs or {}))
        zeros = torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu")
        if func is Tensor.__deepcopy__:
            args[1][id(args[0])] = zeros
        return zeros
