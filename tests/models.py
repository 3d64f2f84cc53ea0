"""Toy models that the tests train, under a strategy and by hand.

Their attention has no key bias: its true gradient is zero, so what is computed is noise that AdamW would blow up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_chunkmbs import ChunkMBSStrategy, StepReport

VOCABULARY = 23
WIDTH = 16
LENGTH = 6
BLOCKS = 3
LAYERS = "net.layers.{*}"


class Attention(nn.Module):
    def __init__(self, batch_dim: int) -> None:
        super().__init__()
        self.batch_dim = batch_dim
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, self.batch_dim)
        query, key, value = (p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2)).transpose(0, self.batch_dim)


class Block(nn.Module):
    """A decoder layer: attention and an MLP, each added to what came in."""

    def __init__(self, batch_dim: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.attention = Attention(batch_dim)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class Stack(nn.Module):
    """A small language model; hidden states are [b, s, h] or, with ``batch_dim=1``, [s, b, h]."""

    def __init__(self, batch_dim: int = 0, dropout: float = 0.0, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.batch_dim = batch_dim
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Block(batch_dim, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def embed(self, tokens: Tensor) -> Tensor:
        return (self.embedding(tokens) + self.position).transpose(0, self.batch_dim)

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        logits = self.head(self.norm(x)).transpose(0, self.batch_dim)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.loss(x, tokens)


class TwoTowers(nn.Module):
    """An encoder whose output is added to a decoder's input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = Stack()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.decoder.embed(tokens)
        y = x.flip(1)
        for layer in self.encoder:
            y = layer(y)
        x = x + y
        for layer in self.decoder.layers:
            x = layer(x)
        return self.decoder.loss(x, tokens)


def batches(sizes: Sequence[int], seed: int = 0) -> list[Tensor]:
    """Batches of token ids, one of each size; other seeds give other data."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (size, LENGTH), generator=generator) for size in sizes]


@dataclass
class Record:
    """What training did, step by step."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)

    def add_gradients(self, net: nn.Module) -> None:
        self.gradients.append({name: full(p.grad).clone() for name, p in net.named_parameters() if p.grad is not None})

    def assert_close(self, expected: Record, tolerance: float = 1e-6) -> None:
        """Losses and the gradients of every parameter agree at every step."""
        assert len(self.losses) == len(self.gradients) == len(expected.losses) > 0
        for step, (ours, theirs) in enumerate(zip(self.gradients, expected.gradients, strict=True)):
            assert abs(self.losses[step] - expected.losses[step]) <= tolerance, f"loss of step {step}"
            assert ours.keys() == theirs.keys()
            for name in theirs:
                difference = (ours[name] - theirs[name]).abs().max().item()
                assert difference <= tolerance, f"step {step}, gradient of {name}: {difference:.1e}"


class Trained(LightningModule):
    """Trains ``net``, whose forward returns a loss, and records it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.record = Record()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(**batch).loss if isinstance(batch, dict) else self.net(batch)
        self.record.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(**batch) if isinstance(batch, dict) else self.net(batch)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.record.add_gradients(self.net)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.record.reports.append(self.trainer.strategy.step_report)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_for(self.net)


def optimizer_for(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def chunked(chunk_mbs: int = 1, batch_dim: int = 0, pattern: str = LAYERS, **options: Any) -> ChunkMBSStrategy:
    """The strategy with the blocks of ``pattern`` cut; recomputation and offload are on."""
    plan = {"apply_modules": [pattern], "chunk_mbs": chunk_mbs, "batch_dim": batch_dim}
    return ChunkMBSStrategy(chunkmbs_plan=plan | options.pop("chunkmbs_plan", {}), **options)


def make_trainer(strategy: ChunkMBSStrategy, **options: Any) -> Trainer:
    """A Trainer on all ranks of the group, without anything that is not asked for."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    world_size = torch.distributed.get_world_size()
    return Trainer(
        **quiet
        | {"accelerator": "cpu", "devices": world_size, "strategy": strategy}
        | {"max_epochs": 1, "use_distributed_sampler": False, "num_sanity_val_steps": 0}
        | options
    )


def fit(module: LightningModule, data: list[Any], strategy: ChunkMBSStrategy, **options: Any) -> Trainer:
    """Train ``module`` on ``data``, this rank's batches, each of them one optimizer step."""
    trainer = make_trainer(strategy, **options)
    trainer.fit(module, Loader(data), Loader(data[:1]) if "val_check_interval" in options else None)
    return trainer


class Loader:
    """Yields ready batches. (A DataLoader draws a random number whenever it is iterated, a list is many loaders.)"""

    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


def train_by_hand(net: nn.Module, data: list[list[Any]], rank: int = 0) -> tuple[nn.Module, Record]:
    """Train a copy of ``net`` in this process: each step on the mean of the losses of all ranks' batches.

    Args:
        net: its forward returns a loss.
        data: for each rank its batches.
        rank: whose losses are recorded.
    """
    net, record = deepcopy(net), Record()
    optimizer = optimizer_for(net)
    for step in zip(*data, strict=True):
        losses = [net(**batch).loss if isinstance(batch, dict) else net(batch) for batch in step]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        record.losses.append(losses[rank].item())
        record.add_gradients(net)
        optimizer.step()
    return net, record
