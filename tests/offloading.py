"""Activation stores on the CPU, small enough to be run some thousand times."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_chunkmbs.arguments import CutRule
from lightning_chunkmbs.offload import ActivationStore, StoreSettings
from lightning_chunkmbs.report import StepCounter
from lightning_chunkmbs.stored_activation import StoredActivation
from lightning_chunkmbs.streams import HostStreams
from tests.chunking import chunk

WIDTH = 4
ROW = WIDTH * 4  # bytes of a sample


def make_store(streams: Any = None, kind: type[ActivationStore] = ActivationStore, **settings: Any) -> ActivationStore:
    streams = streams or HostStreams()
    return kind(StepCounter(), settings=StoreSettings(**settings), streams=lambda device: streams)


def puts(store: ActivationStore, n: int, **how: bool) -> list[StoredActivation]:
    """Put samples 0, 1, ... of one row each, which nobody else holds."""
    return [store.put(torch.full((1, WIDTH), float(i)), **how) for i in range(n)]


def is_loading(handles: list[StoredActivation]) -> list[bool]:
    return [handle.loading is not None for handle in handles]


class Layer(nn.Module):
    """A layer that saves its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) * x


class Stack(nn.Module):
    """Blocks with code of their own between them."""

    def __init__(self, blocks: int, store: ActivationStore | None, rule: CutRule | None, kind: type = Layer) -> None:
        super().__init__()
        torch.manual_seed(blocks)
        self.layers = nn.ModuleList(kind() for _ in range(blocks))
        for layer in self.layers:
            chunk(layer, rule=rule, store=store)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x + 1)
        return x.square().mean()
