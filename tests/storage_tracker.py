"""Bytes of tensors alive at any moment, by watching what every operation returns.

On a CPU the allocator keeps no statistics, so storages are followed one by one, from the operation that made them until
Python and autograd have let go of them. An operation inside another (a fused kernel's scratch memory) is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_chunkmbs.offload import ActivationStore


class _Side:
    """The storages of one kind that live now."""

    def __init__(self) -> None:
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.live = 0
        self.peak = 0

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._alive

    def add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def gone(_: Any) -> None:
            del self._alive[key]
            self.live -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of storages made inside this context for as long as they live.

    Host copies that an activation store makes are counted apart, by the same rule.

    Args:
        keep: which tensors count; a storage counts as soon as one tensor on it does.
    """

    def __init__(self, keep: Callable[[Tensor], bool] = lambda tensor: True) -> None:
        super().__init__()
        self._keep = keep
        self._device, self._host = _Side(), _Side()
        self._side = self._device
        self._putting = patch.object(ActivationStore, "put", self._put_of(ActivationStore.put))

    @property
    def live(self) -> int:
        """Bytes alive now."""
        return self._device.live

    @property
    def peak(self) -> int:
        """Most bytes that were alive together."""
        return self._device.peak

    @property
    def host_peak(self) -> int:
        """Most bytes of host copies that were alive together."""
        return self._host.peak

    def __enter__(self) -> StorageTracker:
        self._putting.start()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._putting.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            # Subclasses (DTensor) have no storage of their own.
            if type(tensor) in (Tensor, torch.nn.Parameter) and self._keep(tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        # A host copy stays one: on a CPU what is reloaded is the copy itself.
        if storage.nbytes() and storage not in self._device and storage not in self._host:
            self._side.add(storage)

    def _put_of(self, put: Callable[[ActivationStore, Tensor], Any]) -> Callable[[ActivationStore, Tensor], Any]:
        def on_the_host(store: ActivationStore, tensor: Tensor) -> Any:
            self._side = self._host
            try:
                return put(store, tensor)
            finally:
                self._side = self._device

        return on_the_host
