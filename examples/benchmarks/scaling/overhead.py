"""What taking turns costs: microseconds that the scheduler adds to each call of a block by a training step.

The same block calls, each for all steps at once, are run by the scheduler (steps in greenlets, their state switched)
and by a plain loop. One process, no sharding, blocks too small to matter::

    python -m examples.benchmarks.scaling.overhead
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from lightning_chunkmbs.arguments import CutRule
from lightning_chunkmbs.block import make_chunked, own_forward, run_block
from lightning_chunkmbs.chunk_runs import BlockCall, BlockSettings
from lightning_chunkmbs.lockstep import Lockstep
from lightning_chunkmbs.report import Notices, StepCounter
from lightning_chunkmbs.step_attributes import StepAttributes


def make_blocks(count: int) -> list[nn.Module]:
    """Return chunked blocks that scale four numbers."""
    blocks: list[nn.Module] = [nn.Linear(4, 4) for _ in range(count)]
    for block in blocks:
        forward, names = own_forward(block)
        settings = BlockSettings(
            name="block",
            forward=forward,
            names=names,
            rule=CutRule(chunk_mbs=1),
            store=None,
            counter=StepCounter(),
            notices=Notices(),
        )
        make_chunked(block, settings)
    return blocks


def by_scheduler(blocks: list[nn.Module], xs: list[Tensor]) -> None:
    """Run one step for each of `xs` in lockstep, with attributes of a module of usual size watched."""

    def step(x: Tensor) -> None:
        for block in blocks:
            x = block(x)

    attributes = StepAttributes({"module": nn.Transformer(8, 1, 1, 1, 8), "child": nn.Linear(1, 1)})
    lockstep = Lockstep(SimpleNamespace(blocks=blocks), attributes, on_turn=lambda _: None)  # type: ignore[arg-type]
    lockstep.forward([lambda x=x: step(x) for x in xs], lambda _i, _output: None)  # type: ignore[misc]


def by_loop(blocks: list[nn.Module], xs: list[Tensor]) -> None:
    """Run the same block calls in a loop."""
    for block in blocks:
        xs = run_block(block, [BlockCall((x,), {}) for x in xs])


def seconds(run: Callable[[list[nn.Module], list[Tensor]], None], blocks: list[nn.Module], xs: list[Tensor]) -> float:
    """Return the time of one run."""
    start = time.perf_counter()
    run(blocks, xs)
    return time.perf_counter() - start


def added_microseconds(blocks: int, steps: int, rounds: int = 20) -> tuple[float, float]:
    """Return the microseconds of a step's call of a block in a loop, and what the scheduler adds to them."""
    made, xs = make_blocks(blocks), [torch.ones(1, 4, requires_grad=True) for _ in range(steps)]
    pairs = [(seconds(by_scheduler, made, xs), seconds(by_loop, made, xs)) for _ in range(rounds + 1)][1:]
    calls = blocks * steps
    loop = statistics.median(b for _, b in pairs) / calls * 1e6
    return loop, statistics.median(a - b for a, b in pairs) / calls * 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    torch.set_num_threads(1)
    loop, added = added_microseconds(**vars(parser.parse_args()))
    print(f"a step's call of a block: {loop:.0f} µs in a loop, the scheduler adds {added:.0f} µs")


if __name__ == "__main__":
    main()
