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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from examples.benchmarks.accumulation.run import FLOOR
from examples.benchmarks.two_nodes import sent_bytes, shaping
from examples.benchmarks.variants import VARIANTS, ComputeFloor, build
from lightning_chunkmbs.step_time import BlockWork, predict

# Streaming moves no other bytes over the link.
NAMES = [name for name in VARIANTS if "streaming" not in name]


def all_variants(options: argparse.Namespace, n: int) -> dict[str, Callable[[int], list[float]]]:
    """Return what runs a number of optimizer steps of ``n`` samples, by name of the variant."""
    floor = ComputeFloor(options, n)

    def computing(steps: int) -> list[float]:
        return [seconds for _ in range(steps) for seconds in floor()]

    return {name: VARIANTS[name](options, n) for name in NAMES} | {FLOOR: computing}


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


def gathered_gbit(nbytes: int, times: int = 8) -> float:
    """Return at how many 10^9 bits per second a node sends in all-gathers of ``nbytes`` each."""
    part = torch.zeros(nbytes // 4 // dist.get_world_size())
    whole = torch.empty(dist.get_world_size() * part.numel())
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        dist.all_gather_into_tensor(whole, part)
    return times * part.nbytes * 8e-9 / (time.perf_counter() - start)


def gather_share(options: argparse.Namespace, nbytes: int, gbit: float) -> float:
    """Return what share of its time computation loses while all-gathers of ``nbytes`` are under way.

    Args:
        options: has ``hidden`` and ``tokens``.
        nbytes: bytes of a gather.
        gbit: 10^9 bits per second to which nodes are limited.
    """
    left, right = torch.randn(options.tokens, options.hidden), torch.randn(options.hidden, 4 * options.hidden)
    part = torch.zeros(nbytes // 4 // dist.get_world_size())
    whole = torch.empty(dist.get_world_size() * part.numel())
    times = max(1, int(0.2 * gbit * 1e9 / 8 / part.nbytes))  # the same on both nodes

    def seconds_of_a_product(gathering: bool) -> float:
        dist.barrier()
        start, products = time.perf_counter(), 0
        for _ in range(times):
            work = dist.all_gather_into_tensor(whole, part, async_op=True) if gathering else None
            until = time.perf_counter() + 0.2 / times
            while time.perf_counter() < until if work is None else not work.is_completed():
                left @ right
                products += 1
        return (time.perf_counter() - start) / max(1, products)

    seconds_of_a_product(gathering=False)  # warms up
    return max(0.0, 1 - seconds_of_a_product(gathering=False) / seconds_of_a_product(gathering=True))


def block_bytes(options: argparse.Namespace) -> tuple[int, int]:
    """Return the bytes of a block's parameters, and of those outside blocks."""
    net = build(options)
    block, whole = (sum(p.nbytes for p in module.parameters()) for module in (net.blocks[0], net))
    return block, whole - options.blocks * block


def predicted(
    options: argparse.Namespace, block: int, kept: int, n: int, gbit: float, share: float, floor: float
) -> float:
    """Return stock's step time over ours as the planner's arithmetic has it.

    Args:
        options: has ``blocks`` and ``devices``.
        block: bytes of a block's parameters.
        kept: bytes of the parameters outside blocks.
        n: micro-batches.
        gbit: 10^9 bits per second that a node sends in a collective.
        share: share of a gather's time that computation beside it loses.
        floor: seconds that they take to compute.
    """
    # A forward pass is a quarter of what a block computes. gloo all-reduces for a reduce-scatter: twice the bytes.
    work = BlockWork(forward_seconds=floor / n / options.blocks / 4, gathered_bytes=block, reduced_bytes=2 * block)
    time = predict(
        [work] * options.blocks,
        micro_batches=n,
        ranks=options.devices,
        link_bytes_per_second=gbit * 1e9 / 8,
        kept_gathered_bytes=kept,
        kept_reduced_bytes=2 * kept,
        overlap=False,
        gather_share=share,
    )
    return 1 / time.ratio


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
    block, kept = block_bytes(options)
    for n in options.n:
        runs = all_variants(options, n)
        for run in runs.values():
            run(1)  # warms up; the first one starts the process group
        for gbit in options.gbit:
            limit(gbit)
            reached = gathered_gbit(block)
            share = statistics.median(gather_share(options, block, gbit) for _ in range(3))
            found = measure(options, runs)
            ratio = predicted(options, block, kept, n, reached, share, found[FLOOR]["ms"] / 1e3)
            rows.append(
                {
                    "n": n,
                    "gbit": gbit,
                    "all_gather_gbit": reached,
                    "gather_share": share,
                    "predicted": ratio,
                    "variants": found,
                }
            )
            if dist.get_rank() == 0:
                print(f"N = {n} at {gbit} Gbit/s is done", flush=True)
        limit(None)
    if dist.get_rank() == 0:
        environment = {"torch": torch.__version__, "lightning": pl.__version__, "python": platform.python_version()}
        environment |= {"CPU cores": os.cpu_count(), "backend": dist.get_backend()}
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        content = {"environment": environment, "settings": settings, "rows": rows}
        Path(options.json).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
