"""Selective recomputation on fake tensors: which results of a chunk are kept, and a recomputation without them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import noop_context_fn

from .selective import find_ops

__all__: list[str] = []


class FakeSaveOps:
    """Keeps results of operators, whose values do not count.

    Args:
        names: names of the operators, as in :class:`~lightning_chunkmbs.RecomputePlan`.

    Attributes:
        unused: names of those that no chunk has run yet.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.ops = find_ops(names)
        self.unused = set(names)

    def contexts(self, sizes: list[int]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return what a chunk's first run and its recomputation run under.

        Args:
            sizes: the bytes of what is kept are added here.
        """
        if not self.ops:
            return noop_context_fn()
        results: list[Any] = []
        return _Keep(self, results, sizes), _GiveBack(self, results)


class _Keep(TorchDispatchMode):
    def __init__(self, save: FakeSaveOps, results: list[Any], sizes: list[int]) -> None:
        super().__init__()
        self._save, self._results, self._sizes = save, results, sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._save.ops:
            self._save.unused.discard(self._save.ops[func])
            self._results.append(result)
            self._sizes += [leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.nbytes]
        return result


class _GiveBack(TorchDispatchMode):
    def __init__(self, save: FakeSaveOps, results: list[Any]) -> None:
        super().__init__()
        self._save, self._results = save, results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._results.pop(0) if func in self._save.ops else func(*args, **(kwargs or {}))
