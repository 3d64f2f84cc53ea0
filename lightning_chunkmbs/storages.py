"""Bytes alive at any moment of a computation on fake tensors (which have sizes and no memory), and its operations."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from .unknown_values import answer_for, note_value, value_of

__all__: list[str] = []


class StorageCounter(TorchDispatchMode):
    """Counts the bytes of storages that operations make, for as long as they live.

    Entered inside a ``FakeTensorMode``. Scratch memory inside an operation is not seen. Programs that ask for
    values are told what [Note: what is told] says.

    Args:
        known: tensors that do not count, also when operations return views of them.

    Attributes:
        live: bytes alive now.
        peak: most bytes alive at once since :meth:`mark`.
        flops: floating point operations of matrix products, convolutions and attention so far.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._known = [tensor.untyped_storage() for tensor in known]
        self._sizes: dict[int, int] = {storage._cdata: 0 for storage in self._known}
        self._alive: dict[int, Any] = {}
        self._paused = False
        self.live = self.peak = self.flops = 0

    def mark(self) -> int:
        """Begin to look for the highest peak anew, and return the bytes alive now."""
        self.peak = self.live
        return self.live

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is made inside does not count."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What was made from a number of the program has a value.
        if func is torch.ops.aten._local_scalar_dense.default and getattr(args[0], "constant", None) is None:
            return value_of(args[0])
        result = _run(func, args, kwargs or {})
        note_value(func, args, result)
        if not self._paused:
            self.flops += _flops(func._overloadpacket, result, args, kwargs or {})
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if not size or key in self._sizes:
            return

        def gone(_: Any) -> None:
            self.live -= self._sizes.pop(key)
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, gone)
        self._sizes[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    answer = answer_for(func)
    if answer is not None:
        return answer(*args, **kwargs)
    if func is not torch.ops.aten._grouped_mm.default or args[0].dtype is torch.bfloat16:
        return func(*args, **kwargs)
    # The shapes of this one are known for bfloat16 only, while its kernel on the CPU takes other dtypes too.
    matrices = [matrix.to(torch.bfloat16) for matrix in args[:2]]
    return func(*matrices, *args[2:], **kwargs).to(args[0].dtype)


def _flops(packet: Any, result: Any, args: Any, kwargs: Any) -> int:
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    name = str(packet)
    if "grouped_mm" in name:
        return _grouped_flops(args, name)
    if name == "aten._scaled_dot_product_flash_attention_for_cpu":
        return 2 * _attention_flops(*args[:3])
    if name == "aten._scaled_dot_product_flash_attention_for_cpu_backward":
        return 5 * _attention_flops(*args[1:4])
    return 0


def _grouped_flops(args: Any, name: str) -> int:
    """Each row of ``[rows, k]`` meets one ``[k, n]`` of ``[groups, k, n]``; that one's gradient costs the same."""
    left, right = args[:2]
    return 2 * left.numel() * right.shape[-1] * (2 if name.endswith("backward") else 1)


def _attention_flops(query: Tensor, key: Tensor, _value: Tensor) -> int:
    """One product of all queries with all keys; of a causal mask no use is made, as in torch's own formulas."""
    return 2 * query.numel() * key.shape[-2]
