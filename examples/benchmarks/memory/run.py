"""Peak bytes of activations over the number of chunks of a step, beside what the formula says; see README.md.

From the root of the repository::

    python -m examples.benchmarks.memory.run
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.benchmarks.common import table, write
from examples.benchmarks.variants import VARIANTS, is_activation, options_of
from tests.storage_tracker import StorageTracker

# Hidden states on the device for each chunk of a step; the root's and what one chunk computes inside come on top.
FORMULA: dict[str, Callable[[int], int]] = {
    "stock": lambda blocks: 0,  # one micro-batch after the other
    "stock, last sync only": lambda blocks: 0,
    "ours, lockstep": lambda blocks: 2,
    "ours, cut": lambda blocks: 2,
    "ours, lockstep, streaming": lambda blocks: 1,
    "ours, cut, streaming": lambda blocks: 1,
}


def measure(options: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Return for each variant the peak of a step (bytes) by its number of chunks."""
    peaks: dict[str, dict[int, float]] = {name: {} for name in VARIANTS}
    for n in options.n:
        for name, make in VARIANTS.items():
            run = make(options, n)
            with StorageTracker(is_activation(options)) as tracker:
                run()
            peaks[name][n] = tracker.peak
    return peaks


def slope(peaks: dict[int, float], hidden_state: int) -> float:
    """Return hidden states per added chunk, between the fewest and the most chunks."""
    (few, low), *_, (many, high) = peaks.items()
    return (high - low) / (many - few) / hidden_state


def tables(options: argparse.Namespace, peaks: dict[str, dict[int, float]]) -> str:
    """Return the results as Markdown."""
    rows = []
    for name, by_n in peaks.items():
        formula = FORMULA[name](options.blocks) if name in FORMULA else "–"
        found = slope(by_n, hidden_state(options))
        rows.append([name, *(f"{p / 1e6:,.2f}" for p in by_n.values()), f"{found:.2f}", formula])
    head = ["peak, MB", *(f"{n} chunks" for n in options.n), "hidden states per added chunk", "formula"]
    return table(head, rows)


def hidden_state(options: argparse.Namespace) -> int:
    """Return the bytes of one sample's hidden state."""
    return options.tokens * options.hidden * 4


def draw(options: argparse.Namespace, peaks: dict[str, dict[int, float]], plot: Any) -> None:
    """Draw peaks over chunks, and the formula's lines through the last points."""
    for name, by_n in peaks.items():
        (line,) = plot.plot(by_n.keys(), [p / 1e6 for p in by_n.values()], marker="o", label=name)
        if name in FORMULA:
            *_, (last, peak) = by_n.items()
            per_chunk = FORMULA[name](options.blocks) * hidden_state(options)
            said = [(peak - (last - n) * per_chunk) / 1e6 for n in by_n]
            plot.plot(by_n.keys(), said, linestyle=":", color=line.get_color())
    plot.xlabel("chunks of a step (dotted: the formula)")
    plot.ylabel("peak of activations, MB")
    plot.yscale("log")
    plot.legend(fontsize=7)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, nargs="+", default=[4, 8, 16, 32, 64], help="chunks, of one sample each")
    parser.add_argument("--devices", type=int, default=1, help="processes")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where results go")
    parser.set_defaults(last_token=True, hidden=256)
    options = options_of(parser)
    warnings.filterwarnings("ignore")
    peaks = measure(options)
    write(options.out, vars(options), peaks, tables(options, peaks), lambda plot: draw(options, peaks, plot))


if __name__ == "__main__":
    main()
