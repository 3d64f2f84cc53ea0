"""What each of the two nodes of ``slow_link.run`` runs: the variants in turns, at each bandwidth."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from examples.benchmarks.accumulation.run import Module, Trained, variants
from examples.benchmarks.two_nodes import sent_bytes, shaping


class HandCut(nn.Module):
    """A block that cuts its batch, recomputes each sample and joins the results: what one writes in a few lines."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([checkpoint(self.block, part, use_reentrant=False) for part in x.split(1)])


class HandCutModule(Module):
    """The stock module with such blocks."""

    def configure_model(self) -> None:
        if isinstance(self.net.blocks[0], HandCut):
            return
        mesh = self.device_mesh["data_parallel"]
        for i, block in enumerate(self.net.blocks):
            self.net.blocks[i] = fully_shard(HandCut(block), mesh=mesh)
        fully_shard(self.net, mesh=mesh)


def all_variants(options: argparse.Namespace, n: int) -> dict[str, Any]:
    """Return the variants of the accumulation benchmark, and those that take N samples as one batch."""

    def big() -> Trained:
        strategy = ModelParallelStrategy(data_parallel_size=options.devices, tensor_parallel_size=1)
        return Trained(options, 1, strategy, samples=n, stock=True)

    by_hand = big()
    by_hand.module = HandCutModule(options.hidden, options.blocks, stock=True)
    return variants(options, n) | {"cut by hand": by_hand, "one big batch": big()}


def limit(gbit: float | None) -> None:
    """Limit what both nodes send, when neither has anything on its way."""
    dist.barrier()
    subprocess.run(shaping(gbit), check=True, timeout=30)
    dist.barrier()


def settled_bytes() -> int:
    """Return what this node has sent, when all of it has left the queue that limits it."""
    for _ in (1, 2):  # what the other node sends in the second says that it had what this one sent in the first
        dist.barrier()
    return sent_bytes()


def gathered_gbit(megabytes: int = 8) -> float:
    """Return at how many 10^9 bits per second a node sends in an all-gather of tensors of this size."""
    part = torch.zeros(megabytes * 250_000)
    whole = torch.empty(dist.get_world_size() * part.numel())
    dist.barrier()
    start = time.perf_counter()
    dist.all_gather_into_tensor(whole, part)
    return part.nbytes * 8e-9 / (time.perf_counter() - start)


def measure(options: argparse.Namespace, runs: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Run the variants in turns; return median step times (ms) and MB that a node sent per step, headers included."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    sent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            before = settled_bytes()
            times[name] += run(options.steps)
            sent[name].append((settled_bytes() - before) / options.steps)
    return {
        name: {"ms": 1e3 * statistics.median(times[name]), "sent_MB": statistics.median(sent[name]) / 1e6}
        for name in runs
    }


def main() -> None:
    """Measure, and write the results on the first node."""
    options = argparse.Namespace(**json.loads(os.environ["SLOW_LINK"]))
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    rows = []
    for n in options.n:
        runs = all_variants(options, n)
        for run in runs.values():
            run(1)  # warms up; the first one starts the process group
        for gbit in options.gbit:
            limit(gbit)
            rows.append({"n": n, "gbit": gbit, "all_gather_gbit": gathered_gbit(), "variants": measure(options, runs)})
            if dist.get_rank() == 0:
                print(f"N = {n} at {gbit} Gbit/s is done", flush=True)
        limit(None)
    if dist.get_rank() == 0:
        environment = {"torch": torch.__version__, "lightning": pl.__version__, "python": platform.python_version()}
        environment |= {"CPU cores": os.cpu_count(), "backend": dist.get_backend()}
        content = {"environment": environment, "settings": vars(options), "rows": rows}
        Path(options.json).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
