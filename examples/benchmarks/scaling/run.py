"""What a step costs as blocks, chunks and ranks grow, and what the scheduler adds to each block call; see README.md.

From the root of the repository::

    python -m examples.benchmarks.scaling.run
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist

from examples.benchmarks.common import ratio, side_by_side, table, write
from examples.benchmarks.scaling.overhead import added_microseconds
from examples.benchmarks.variants import STOCK, VARIANTS, options_of

OURS = "ours, lockstep"


def step_times(options: argparse.Namespace, n: int, minutes: float) -> dict[str, float]:
    """Return milliseconds of a step of N micro-batches, ours beside stock's."""
    runs = {name: VARIANTS[name](options, n) for name in (STOCK, OURS)}
    times = side_by_side(runs, minutes, options.rounds)
    return {
        "stock_ms": 1e3 * statistics.median(times[STOCK]),
        "ours_ms": 1e3 * statistics.median(times[OURS]),
        "ratio": ratio(times[OURS], times[STOCK]),
    }


def cells(options: argparse.Namespace) -> list[tuple[int, int, int]]:
    """Return ranks, blocks and chunks of each measurement: one of them grows, the others stay in the middle."""
    middle = (2, options.block_counts[len(options.block_counts) // 2], options.n[len(options.n) // 2])
    by_blocks = [(middle[0], blocks, middle[2]) for blocks in options.block_counts]
    by_chunks = [(middle[0], middle[1], n) for n in options.n]
    by_ranks = [(ranks, middle[1], middle[2]) for ranks in options.ranks]
    return list(dict.fromkeys(by_blocks + by_chunks + by_ranks))


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """Measure all cells, each number of ranks in a launch of its own."""
    rows: list[dict[str, float]] = []
    todo = cells(options)
    for ranks in sorted({ranks for ranks, *_ in todo}):
        mine = [(blocks, n) for r, blocks, n in todo if r == ranks]
        path = folder / f"{ranks}.json"
        minutes = options.minutes * len(mine) / len(todo)
        # A launch of its own, since a process keeps its process group.
        command = [sys.executable, "-m", "examples.benchmarks.scaling.run", "--cells", json.dumps(mine)]
        command += ["--devices", str(ranks), "--minutes", str(minutes), "--out", str(path)]
        command += ["--hidden", str(options.hidden), "--tokens", str(options.tokens), "--rounds", str(options.rounds)]
        subprocess.run(command, check=True)
        rows += json.loads(path.read_text())
    return rows


def measure_cells(options: argparse.Namespace) -> None:
    """Measure the cells of one number of ranks and write them."""
    rows, todo = [], json.loads(options.cells)
    for options.blocks, n in todo:
        found = step_times(options, n, options.minutes / len(todo))
        rows.append({"ranks": options.devices, "blocks": options.blocks, "chunks": n, **found})
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(rows))


def tables(rows: list[dict[str, float]], overhead: dict[str, float]) -> str:
    """Return the results as Markdown."""
    body = [
        [r["ranks"], r["blocks"], r["chunks"], f"{r['stock_ms']:.0f}", f"{r['ours_ms']:.0f}", f"{r['ratio']:.2f}"]
        for r in rows
    ]
    text = table(["ranks", "blocks", "chunks", "stock, ms a step", "ours, ms a step", "ours over stock"], body)
    lines = [[steps, f"{added:.0f}"] for steps, added in overhead.items()]
    return f"{text}\n\n" + table(
        ["steps side by side", "µs that the scheduler adds to a step's call of a block"], lines
    )


def draw(rows: list[dict[str, float]], plot: Any) -> None:
    """Draw milliseconds of a step as one of the three grows."""
    fixed = {name: statistics.mode(r[name] for r in rows) for name in ("ranks", "blocks", "chunks")}
    for i, grows in enumerate(fixed):
        chosen = [r for r in rows if all(r[name] == fixed[name] for name in fixed if name != grows)]
        chosen.sort(key=lambda r: r[grows])
        plot.subplot(1, 3, i + 1)
        for name in ("stock_ms", "ours_ms"):
            plot.plot([r[grows] for r in chosen], [r[name] for r in chosen], marker="o", label=name.split("_")[0])
        plot.xlabel(grows)
        plot.ylim(bottom=0)
    plot.subplot(1, 3, 1)
    plot.ylabel("ms a step")
    plot.legend()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--block-counts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--n", type=int, nargs="+", default=[2, 8, 16], help="chunks, each a micro-batch of one sample")
    parser.add_argument("--rounds", type=int, default=9, help="turns at most; the first one more warms up")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where results go")
    parser.add_argument("--cells", help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(minutes=4.0, hidden=256)
    options = options_of(parser)
    warnings.filterwarnings("ignore")
    if options.cells:
        measure_cells(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    overhead = {str(steps): added_microseconds(blocks=32, steps=steps, rounds=10)[1] for steps in (1, 4, 16)}
    results = {"steps": rows, "scheduler_us_per_call": overhead}
    write(options.out, vars(options), results, tables(rows, overhead), lambda plot: draw(rows, plot))


if __name__ == "__main__":
    main()
