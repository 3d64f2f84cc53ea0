"""Step time and gathered bytes of gradient accumulation: stock FSDP2, and the same setting under ChunkMBSStrategy.

Variants run in turns in one launch, so that load on the machine meets all of them; each figure is the median over the
rounds. Run it from the root of the repository::

    python examples/benchmarks/accumulation/run.py --json examples/benchmarks/results/accumulation.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_chunkmbs import ChunkMBSPlan, ChunkMBSStrategy

VOCABULARY = 256


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Network(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, hidden: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(blocks))
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, tokens: Tensor, recompute: bool = False) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return self.head(x)


class Module(pl.LightningModule):
    """The same training for every variant; `stock` shards and recomputes in configure_model as users do today."""

    def __init__(self, hidden: int, blocks: int, stock: bool, last_only: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Network(hidden, blocks)
        self.stock, self.last_only = stock, last_only
        self.times: list[float] = []
        self._sharded = False

    def configure_model(self) -> None:
        if not self.stock or self._sharded:
            return
        self._sharded = True
        mesh = self.device_mesh["data_parallel"]
        for i, block in enumerate(self.net.blocks):
            self.net.blocks[i] = fully_shard(checkpoint_wrapper(block), mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(tokens).flatten(0, 1), tokens.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        n = self.trainer.accumulate_grad_batches
        if self.last_only and isinstance(self.net, FSDPModule):
            self.net.set_requires_gradient_sync(batch_idx % n == n - 1)
        if batch_idx % n == 0:
            dist.barrier()
            self._start = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self.times.append(time.perf_counter() - self._start)


class GatheredBytes:
    """Counts the bytes that all-gathers bring to this rank."""

    def __init__(self) -> None:
        self.bytes = 0
        names = ("all_gather_single", "all_gather_into_tensor")  # the first from torch 2.12 on
        self._names = [name for name in names if hasattr(dist, name)]

    def __enter__(self) -> GatheredBytes:
        self._originals = {name: getattr(dist, name) for name in self._names}
        for name, original in self._originals.items():
            setattr(dist, name, self._counted(original))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(output: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.bytes += output.nbytes
            return original(output, *args, **kwargs)

        return call


class Trained:
    """A variant trained by Lightning, some optimizer steps at a time."""

    def __init__(self, options: argparse.Namespace, n: int, strategy: Any, *, samples: int = 1, **module: Any) -> None:
        self.samples = samples
        self.module = Module(options.hidden, options.blocks, **module)
        self.trainer = pl.Trainer(
            accelerator="cpu",
            devices=options.devices,
            strategy=strategy,
            accumulate_grad_batches=n,
            max_steps=0,
            max_epochs=-1,
            **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        )
        self.n, self.options, self.bytes = n, options, 0

    def __call__(self, steps: int) -> list[float]:
        """Train `steps` optimizer steps and return their times in seconds."""
        torch.manual_seed(1)
        count = steps * self.n * self.samples * self.options.devices
        data = torch.randint(0, VOCABULARY, (count, self.options.tokens))
        self.trainer.fit_loop.epoch_loop.max_steps = self.trainer.global_step + steps
        self.module.times.clear()
        with GatheredBytes() as gathered:
            self.trainer.fit(self.module, DataLoader(data, batch_size=self.samples))
        self.bytes = gathered.bytes // steps
        return list(self.module.times)


class ComputeFloor:
    """The same micro-batches on every rank for itself: no sharding, no communication."""

    bytes = 0

    def __init__(self, options: argparse.Namespace, n: int) -> None:
        torch.manual_seed(0)
        self.net, self.n, self.options = Network(options.hidden, options.blocks), n, options
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)

    def __call__(self, steps: int) -> list[float]:
        times = []
        for _ in range(steps):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(self.n):
                tokens = torch.randint(0, VOCABULARY, (1, self.options.tokens))
                logits = self.net(tokens, recompute=True)
                (nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()) / self.n).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            times.append(time.perf_counter() - start)
        return times


def variants(options: argparse.Namespace, n: int) -> dict[str, Callable[[int], list[float]]]:
    """Return the variants for N micro-batches of one sample."""
    plan = ChunkMBSPlan(apply_modules=["net.blocks.{*}"], chunk_mbs=1)

    def stock() -> ModelParallelStrategy:
        return ModelParallelStrategy(data_parallel_size=options.devices, tensor_parallel_size=1)

    return {
        "stock": Trained(options, n, stock(), stock=True),
        "stock, last sync only": Trained(options, n, stock(), stock=True, last_only=True),
        "lockstep": Trained(options, n, ChunkMBSStrategy(chunkmbs_plan=plan), stock=False),
        "one batch, cut": Trained(options, 1, ChunkMBSStrategy(chunkmbs_plan=plan), samples=n, stock=False),
        "compute floor": ComputeFloor(options, n),
    }


def measure(options: argparse.Namespace, n: int) -> dict[str, dict[str, float]]:
    """Run the variants in turns and return median step time (ms), its ratio to stock, and gathered MB per step."""
    runs = variants(options, n)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(options.rounds + 1):
        for name, run in runs.items():
            taken = run(options.steps)
            if round_:  # the first one warms up
                times[name] += taken
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    return {
        name: {
            "ms": 1e3 * median,
            "ratio_to_stock": median / medians["stock"],
            "gathered_MB": getattr(runs[name], "bytes", 0) / 1e6,
        }
        for name, median in medians.items()
    }


def table(results: dict[int, dict[str, dict[str, float]]]) -> str:
    """Return the results as a Markdown table: time over stock's and gathered MB per optimizer step."""
    names = list(next(iter(results.values())))
    lines = ["| N | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for n, row in results.items():
        cells = [f"{row[name]['ratio_to_stock']:.2f} ({row[name]['gathered_MB']:.0f} MB)" for name in names]
        lines.append(f"| {n} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="micro-batches per optimizer step")
    parser.add_argument("--devices", type=int, default=2, help="processes")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96, help="tokens per micro-batch")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps of a variant before the next one's turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns that count; the first one more warms up")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    results = {n: measure(options, n) for n in options.n}
    if dist.get_rank() == 0:
        print(f"step time over stock's (gathered bytes per step and rank), {options.devices} processes")
        print(table(results), flush=True)
        if options.json:
            environment = {"torch": torch.__version__, "lightning": pl.__version__, "python": platform.python_version()}
            settings = {k: str(v) for k, v in vars(options).items() if k != "json"}
            content = {"environment": environment, "settings": settings, "results": results}
            options.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
