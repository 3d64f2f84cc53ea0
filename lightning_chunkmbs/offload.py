"""Activation store: entry activations of chunks wait on the host until they are recomputed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .report import StepCounter


class HostActivation:
    """One entry activation on the host. It lives exactly as long as the autograd graph that needs it.

    The host copy has its own storage: chunks are views of a whole batch, which must be free to go.
    """

    __slots__ = ("_store", "device", "host")

    def __init__(self, store: ActivationStore, tensor: Tensor) -> None:
        self._store = store
        self.device = tensor.device
        self.host = torch.empty_like(tensor, device="cpu", requires_grad=False)
        self.host.copy_(tensor)
        store.live_bytes += self.host.nbytes

    def __del__(self) -> None:
        # An activation whose copy failed (out of host memory) was never counted.
        if hasattr(self, "host"):
            self._store.live_bytes -= self.host.nbytes


class ActivationStore:
    """Takes entry activations out of the graph when they are saved and gives them back for recomputation.

    Nothing is looked up by key, so nothing can be left behind: a handle that the graph drops (after backward, after
    an exception, or because a block's backward never runs) frees its host memory.

    Attributes:
        live_bytes: bytes held on the host now.
    """

    def __init__(self, counter: StepCounter) -> None:
        self._counter = counter
        self.live_bytes = 0

    def put(self, tensor: Tensor) -> HostActivation:
        """Copy ``tensor`` (any shape, dtype and device) to the host."""
        activation = HostActivation(self, tensor)
        self._counter.add("offloaded_bytes", activation.host.nbytes)
        return activation

    def take(self, activation: HostActivation) -> Tensor:
        """Return the tensor that was put, on its device, with storage of its own."""
        self._counter.add("reloaded_bytes", activation.host.nbytes)
        return activation.host.to(activation.device)

    def hooks(self, entry: Tensor) -> saved_tensors_hooks:
        """Return a context in which saving ``entry`` puts it into this store; all else is saved as usual."""
        # Autograd keeps the pack hook as long as what it packed, so the hook must not hold the entry itself.
        place = _memory(entry)

        def pack(saved: Tensor) -> Tensor | HostActivation:
            # Autograd may hand over a detached alias, so memory is compared and not identity.
            return self.put(saved) if _memory(saved) == place else saved

        def unpack(packed: Tensor | HostActivation) -> Tensor:
            return self.take(packed) if isinstance(packed, HostActivation) else packed

        return saved_tensors_hooks(pack, unpack)


def _memory(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
