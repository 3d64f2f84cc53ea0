"""Selective recomputation: results of named operations are kept and not computed again.

torch's own way keeps them in a dictionary that no saved-tensor hook sees, on the device. Here they go to the activation
store, as entry activations do.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

Put = Callable[[Tensor], Any]
Take = Callable[[Any], Tensor]


def find_ops(names: Iterable[str]) -> dict[OpOverload, str]:
    """Return the operators that ``names`` stand for, each with its name.

    Args:
        names: names under ``torch.ops``, e.g. ``aten.mm`` (all overloads) or ``aten.mm.default``. Where an operator has
            a variant for the CPU (``aten._scaled_dot_product_flash_attention_for_cpu``), its name stands for that too.

    Raises:
        ValueError: there is no such operator, or its results share memory with its arguments.
    """
    return {op: name for name in names for op in _overloads(name)}


def _overloads(name: str) -> list[OpOverload]:
    found = _look_up(name)
    if found is None:
        namespace, _, op = name.partition(".")
        near = difflib.get_close_matches(op, dir(getattr(torch.ops, namespace)), n=3)
        hint = ", ".join(f"{namespace}.{n}" for n in near) or "aten._scaled_dot_product_flash_attention"
        raise ValueError(
            f"RecomputePlan.save_ops names operators under torch.ops, and {name!r} is none. Near it: {hint}."
        )
    every = [found, _look_up(f"{name}_for_cpu")]
    ops = [op for each in every if each is not None for op in _of(each)]
    if any(result.alias_info is not None for op in ops for result in op._schema.returns):
        raise ValueError(
            f"RecomputePlan.save_ops keeps results that an operator makes, and those of {name!r} share memory with its "
            f"arguments (it is a view or works in place). Take it out of save_ops."
        )
    return ops


def _look_up(name: str) -> Any:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, (OpOverload, OpOverloadPacket)) else None


def _of(found: OpOverload | OpOverloadPacket) -> list[OpOverload]:
    if isinstance(found, OpOverload):
        return [found]
    return [getattr(found, overload) for overload in found.overloads() if not overload.endswith("out")]


class SaveOps:
    """The operators whose results a model's blocks keep, and which of them have run.

    Args:
        ops: as :func:`find_ops` returns them.
    """

    def __init__(self, ops: dict[OpOverload, str]) -> None:
        self.ops = ops
        self._seen: set[str] = set()
        self.running: list[_Keep] = []

    def apart(self, output: Tensor) -> Tensor:
        """Return a block's output with memory of its own if it is a kept result, which its receiver may write to."""
        kept = {value.untyped_storage().data_ptr() for run in self.running for value, _ in run.versions}
        return output.clone() if kept and output.untyped_storage().data_ptr() in kept else output

    def contexts(self, block: str, put: Put, take: Take) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """Return what one chunk's first run and its recomputation run under.

        Args:
            block: name of the block, for messages.
            put: takes a result away.
            take: gives it back.
        """
        kept: _Results = []
        return _Keep(self, block, kept, put), _GiveBack(self, block, kept, take)

    def saw(self, op: OpOverload) -> None:
        """Note that an operator has run in a block."""
        self._seen.add(self.ops[op])

    @property
    def unused(self) -> list[str]:
        """Names of operators that no block has run yet."""
        return sorted(set(self.ops.values()) - self._seen)


class _Random:
    """State of the random numbers around an operator that may draw some: one that is not run again must not draw less.

    What comes after it in the block would else draw other numbers than in the first run.
    """

    def __init__(self, op: OpOverload, args: Any) -> None:
        draws = torch.Tag.nondeterministic_seeded in op.tags
        devices = (a.device for a in tree_leaves(args) if isinstance(a, Tensor))
        self._device = next(devices, torch.device("cpu")) if draws else None
        self._state = self._now()

    def _now(self) -> Tensor | None:
        if self._device is None:
            return None
        on_host = self._device.type == "cpu"
        return torch.get_rng_state() if on_host else torch.get_device_module(self._device).get_rng_state(self._device)

    def changed(self) -> _Random | None:
        """Return the state after the operator, if it has drawn random numbers."""
        before, self._state = self._state, self._now()
        return None if before is None or self._state is None or torch.equal(before, self._state) else self

    def restore(self) -> None:
        """Go on after what the operator drew."""
        if self._state is None or self._device is None:
            return
        if self._device.type == "cpu":
            torch.set_rng_state(self._state)
        else:
            torch.get_device_module(self._device).set_rng_state(self._state, self._device)


_Results = list[tuple[OpOverload, Any, "_Random | None"]]


@dataclass
class _Kept:
    """Stands for a tensor in a kept result."""

    handle: Any


class _Keep(TorchDispatchMode):
    """Keeps the results of the named operators."""

    def __init__(self, save: SaveOps, block: str, kept: _Results, put: Put) -> None:
        super().__init__()
        self._save, self._block, self._kept, self._put = save, block, kept, put
        self.versions: list[tuple[Tensor, int]] = []

    def __enter__(self) -> Any:
        self._save.running.append(self)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._save.ops:
            return func(*args, **(kwargs or {}))
        self._save.saw(func)
        random = _Random(func, args)
        result = func(*args, **(kwargs or {}))
        self._kept.append((func, tree_map(self._keep, result), random.changed()))
        return result

    def _keep(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # The tensor itself: below autograd, an alias has a version counter of its own.
        self.versions.append((value, value._version))
        return _Kept(self._put(value.detach()))

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._save.running.remove(self)
        changed = any(value._version != version for value, version in self.versions)
        self.versions.clear()
        if changed and exception[0] is None:
            names = sorted({self._save.ops[op] for op, *_ in self._kept})
            raise RuntimeError(
                f"{self._block}: a result that RecomputePlan.save_ops keeps was changed in place afterwards, so it is "
                f"not what recomputation needs. Operators that have run: {', '.join(names)}. Take the one out of "
                f"save_ops."
            )


class _GiveBack(TorchDispatchMode):
    """Gives kept results back in place of computing them."""

    def __init__(self, save: SaveOps, block: str, kept: _Results, take: Take) -> None:
        super().__init__()
        self._save, self._block, self._kept, self._take = save, block, kept, take
        self._next = 0

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._save.ops:
            return func(*args, **(kwargs or {}))
        op, result, state = self._kept[self._next] if self._next < len(self._kept) else (None, None, None)
        if op is not func:
            raise RuntimeError(
                f"{self._block}: recomputation ran {self._save.ops[func]} where the first run did not, so results that "
                f"RecomputePlan.save_ops keeps cannot be matched. Take it out of save_ops, or make the block run the "
                f"same operations each time."
            )
        self._next += 1
        if state is not None:
            state.restore()
        return tree_map(lambda value: self._take(value.handle) if isinstance(value, _Kept) else value, result)
