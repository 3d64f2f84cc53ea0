"""A host for tests: copies in numpy, so that no tensor's memory can be behind a part that waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_chunkmbs.host_functions import join, stash
from lightning_chunkmbs.host_tensor import HostTensor


class FakePart:
    """A copy in numpy; ``loads`` counts how often it was loaded."""

    def __init__(self, host: FakeHost, tensor: Tensor) -> None:
        self.host, self.values = host, tensor.contiguous().numpy().copy()
        self.shape, self.dtype, self.device, self.nbytes = tensor.shape, tensor.dtype, tensor.device, tensor.nbytes
        self.loads = 0
        host.live += 1

    def load(self, *, forward: bool = False) -> Tensor:
        self.host.on_load()
        self.loads += 1
        self.host.most_loads = max(self.host.most_loads, self.loads)
        self.host.loads += 1
        return torch.from_numpy(self.values).clone()

    def __del__(self) -> None:
        self.host.live -= 1


class FakeHost:
    """Counts what is put, loaded and alive.

    Args:
        keep: number of tensors that stay on the device before others are put, as if there were no memory.
    """

    def __init__(self, keep: int = 0) -> None:
        self.keep, self.puts, self.loads, self.live, self.most_loads = keep, 0, 0, 0, 0
        self.on_load: Callable[[], Any] = lambda: None

    def put(self, tensor: Tensor) -> Any:
        assert type(tensor) is Tensor
        assert not tensor.requires_grad
        if self.keep:
            self.keep -= 1
            return tensor
        self.puts += 1
        return FakePart(self, tensor)


class Through(Function):
    """Returns its inputs, as FSDP2's Function does."""

    @staticmethod
    def forward(group, *inputs):
        return inputs

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        return None, *grads


def hollow(tensor: Tensor, host: FakeHost, sizes: tuple[int, ...] = (1, 2, 1), dim: int = 0) -> HostTensor:
    """Return ``tensor`` as a HostTensor of parts of ``sizes``, differentiably."""
    return join([stash(piece, host.put) for piece in tensor.split(sizes, dim)], dim)
