"""One window of micro-batches: through the strategy, and through the plain model as the oracle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from lightning_chunkmbs import StepReport
from lightning_chunkmbs.lockstep import Lockstep
from tests.models import VOCABULARY, chunked, fit, full
from tests.structure_models import Decoder

SIZES = [3, 1, 2, 3]  # samples of the micro-batches of a window
LENGTHS = [6, 8, 5, 7]


def build(kind: type[nn.Module] = Decoder, *args: Any) -> nn.Module:
    torch.manual_seed(1)
    return kind(*args)


def micro_batches(sizes: Sequence[int] = SIZES, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Tensor]:
    """Batches of tokens, of these numbers of samples and of ``lengths`` in turn."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(size, lengths[i % len(lengths)]) for i, size in enumerate(sizes)]
    return [torch.randint(VOCABULARY, shape, generator=generator) for shape in shapes]


@dataclass
class Observed:
    """What lockstep did, for each of its backward passes."""

    runs: list[int] = field(default_factory=list)  # as it says itself
    autograd: list[int] = field(default_factory=list)  # calls of torch.autograd.backward, counted


@contextmanager
def observed() -> Iterator[Observed]:
    seen, lockstep_backward, autograd_backward = Observed(), Lockstep.backward, torch.autograd.backward

    def counting(*args: Any, **kwargs: Any) -> None:
        seen.autograd[-1] += 1
        autograd_backward(*args, **kwargs)

    def observing(self: Lockstep) -> None:
        seen.autograd.append(0)
        with patch.object(torch.autograd, "backward", counting):
            lockstep_backward(self)
        seen.runs.append(self.runs)

    with patch.object(Lockstep, "backward", observing):
        yield seen


class Windowed(LightningModule):
    """Trains ``net``, whose forward returns a loss or has one in its output, and records a step."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses: dict[int, float] = {}
        self.gradients: dict[str, Tensor] = {}
        self.report = StepReport()
        self.seen = Observed()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self.net, batch)
        self.losses[batch_idx] = loss.item()
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients = gradients(self.net)

    def on_train_batch_end(self, *_: Any) -> None:
        self.report = self.trainer.strategy.step_report

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    return net(**batch).loss if isinstance(batch, dict) else net(batch)


def gradients(net: nn.Module) -> dict[str, Tensor]:
    return {name: full(p.grad).clone() for name, p in net.named_parameters() if p.grad is not None}


def train_window(module: Windowed | nn.Module, data: list[Any], strategy: Any = None, **options: Any) -> Windowed:
    """Train one optimizer step on the micro-batches of ``data``."""
    module = module if isinstance(module, Windowed) else Windowed(module)
    with observed() as module.seen:
        fit(module, data, strategy or chunked(2), accumulate_grad_batches=len(data), **options)
    return module


def accumulate(net: nn.Module, data: list[list[Any]]) -> tuple[dict[str, Tensor], list[list[float]]]:
    """The oracle: gradients and losses of a plain model, one micro-batch after the other; data is one list per rank."""
    losses: list[list[float]] = [[] for _ in data]
    for rank, batches in enumerate(data):
        for batch in batches:
            loss = loss_of(net, batch)
            (loss / (len(batches) * len(data))).backward()
            losses[rank].append(loss.item())
    return gradients(net), losses


def chunk_by_chunk(blocks: Sequence[nn.Module], chunk_mbs: int) -> None:
    """Make plain blocks run and back-propagate one chunk after the other, each adding to the gradients by itself."""

    def cut(value: Any, size: int, part: slice) -> Any:
        return tree_map(lambda v: v[part] if isinstance(v, Tensor) and v.ndim and len(v) == size else v, value)

    def by_chunks(forward: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        outputs = []
        for start in reversed(range(0, len(x), chunk_mbs)):  # so that backward visits the first chunk first
            part = slice(start, start + chunk_mbs)
            sides, keywords = cut((args, kwargs), len(x), part) if len(x) > 1 else (args, kwargs)
            run = partial(lambda keywords, x, *sides: forward(x, *sides, **keywords), keywords)
            outputs.insert(0, checkpoint(run, x[part], *sides, use_reentrant=True))
        return torch.cat(outputs)

    for block in blocks:
        block.forward = partial(by_chunks, block.forward)


def different(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> set[str]:
    """Names of gradients that are not bit for bit the same."""
    assert ours.keys() == theirs.keys()
    return {name for name in ours if not torch.equal(ours[name], theirs[name])}


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert ours.keys() == theirs.keys()
    assert ours
    scale = max(1.0, *(t.abs().max().item() for t in theirs.values()))
    apart = {name: (ours[name] - theirs[name]).abs().max().item() for name in theirs}
    assert max(apart.values()) <= tolerance * scale, apart
