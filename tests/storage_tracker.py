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
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_chunkmbs.host_buffers import HostBuffer, HostBuffers


class _Side:
    """The storages of one kind that live now."""

    def __init__(self) -> None:
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self.live = 0
        self.peak = 0

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._alive

    def add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata

        self._alive[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._sizes[key] = 0
        self.resized(storage)

    def discard(self, storage: torch.UntypedStorage) -> None:
        """Let a storage count here no longer."""
        if storage in self:
            self._forget(storage._cdata)

    def _forget(self, key: int) -> None:
        del self._alive[key]
        self.live -= self._sizes.pop(key)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Take note of the size that a storage has now, if it counts here."""
        if storage in self:
            self.live += storage.nbytes() - self._sizes[storage._cdata]
            self._sizes[storage._cdata] = storage.nbytes()
            self.peak = max(self.peak, self.live)


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of storages made inside this context for as long as they live.

    Host buffers that an activation store uses are counted apart, by the same rule: one counts from the first copy into
    it that counts, for as long as it exists.

    Args:
        keep: which tensors count; a storage counts as soon as one tensor on it does.
    """

    def __init__(self, keep: Callable[[Tensor], bool] = lambda tensor: True) -> None:
        super().__init__()
        self._keep = keep
        self._device, self._host = _Side(), _Side()
        # Which storages are host buffers: the pool hands them out, new or used.
        self._buffers: dict[int, weakref.ref[Any]] = {}
        self._getting = patch.object(HostBuffers, "get", self._get_of(HostBuffers.get))
        # FSDP2 frees what it has gathered by shrinking its memory to nothing, which is no operation.
        resize = self._resize_of(torch.UntypedStorage.resize_)
        self._resizing = patch.object(torch.UntypedStorage, "resize_", resize)

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
        self._getting.start()
        self._resizing.start()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._getting.stop()
        self._resizing.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            # What a DTensor computes inside is not seen, and what it holds is.
            tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            # Other subclasses have no storage of their own.
            own = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type != "meta"
            if own and self._keep(tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() and storage not in self._device and storage not in self._host:
            buffer = self._buffers.get(storage._cdata, lambda: None)()
            (self._device if buffer is None else self._host).add(storage)

    def _resize_of(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        def resize_and_note(storage: torch.UntypedStorage, nbytes: int) -> Any:
            resized = resize(storage, nbytes)
            for side in (self._device, self._host):
                side.resized(storage)
            return resized

        return resize_and_note

    def _get_of(self, get: Callable[..., HostBuffer]) -> Callable[..., HostBuffer]:
        def get_and_note(buffers: HostBuffers, nbytes: int, allocate: Callable[[int], Tensor]) -> HostBuffer:
            buffer = get(buffers, nbytes, lambda n: self._noted(allocate(n)))
            self._noted(buffer.memory)
            return buffer

        return get_and_note

    def _noted(self, memory: Tensor) -> Tensor:
        storage = memory.untyped_storage()
        self._device.discard(storage)  # the operation that allocated it was seen before it was known what for
        self._buffers[storage._cdata] = weakref.ref(storage)
        return memory
