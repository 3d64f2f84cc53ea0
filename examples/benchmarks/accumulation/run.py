"""Step time, communicated bytes, peak of activations and gradient error of N accumulated micro-batches; see README.md.

From the root of the repository::

    python -m examples.benchmarks.accumulation.run
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from examples.benchmarks.common import ratio, side_by_side, table, write
from examples.benchmarks.variants import STOCK, VARIANTS, ComputeFloor, Trained, build, data, is_activation, options_of
from tests.storage_tracker import StorageTracker

FLOOR = "compute floor"


def measure(options: argparse.Namespace, n: int, minutes: float) -> dict[str, dict[str, float]]:
    """Return the figures of every variant for N micro-batches of one sample."""
    start = time.perf_counter()
    runs = {name: make(options, n) for name, make in VARIANTS.items()}
    floor = ComputeFloor(options, n)
    found = {name: counted(options, run) for name, run in runs.items()}
    exact = exact_gradients(options, n)
    rows = {name: bytes_ | {"gradient_error": error(grads, exact)} for name, (bytes_, grads) in found.items()}
    left = minutes - (time.perf_counter() - start) / 60
    times = side_by_side({**runs, FLOOR: floor}, left, options.rounds)
    for name, taken in times.items():
        own = {"ms": 1e3 * statistics.median(taken), "ratio_to_stock": ratio(taken, times[STOCK]), "rounds": len(taken)}
        rows[name] = rows.get(name, {}) | own
    return rows


def counted(options: argparse.Namespace, run: Trained) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return what one step communicates and holds, and its gradients."""
    with StorageTracker(is_activation(options)) as tracker:
        gradients = run.gradients()
    bytes_ = {
        "gathered_MB": run.communicated.gathered / 1e6,
        "reduced_MB": run.communicated.reduced / 1e6,
        "peak_activations_MB": tracker.peak / 1e6,
    }
    return bytes_, gradients


def exact_gradients(options: argparse.Namespace, n: int) -> dict[str, Tensor]:
    """Return the gradients of the same samples in fp64, each rank computing its share of them."""
    net, samples = build(options).double(), data(options, n * dist.get_world_size())
    for tokens in samples[dist.get_rank() :: dist.get_world_size()].split(1):
        (net.loss(tokens) / len(samples)).backward()
    gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return gradients


def error(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Return the norm of the difference of all gradients over that of the exact ones."""
    if ours.keys() != exact.keys():
        raise RuntimeError(f"gradients of other parameters: {sorted(ours.keys() ^ exact.keys())}")
    apart = sum((ours[name].double() - g).square().sum() for name, g in exact.items())
    return float((apart / sum(g.square().sum() for g in exact.values())).sqrt())


def tables(results: dict[int, dict[str, dict[str, float]]]) -> str:
    """Return the results as Markdown: a line for each variant, a column for each N."""
    parts = []
    for title, name, form in (
        ("Step time over stock's (median of ratios taken side by side)", "ratio_to_stock", ".2f"),
        ("MB of parameters gathered per rank and step", "gathered_MB", ",.0f"),
        ("MB of gradients reduced per rank and step", "reduced_MB", ",.0f"),
        ("Peak of activations, MB per rank", "peak_activations_MB", ",.1f"),
        ("Relative error of gradients against fp64", "gradient_error", ".1e"),
    ):
        variants = [v for v in next(iter(results.values())) if name in results[next(iter(results))][v]]
        rows = [[v, *(format(by_variant[v][name], form) for by_variant in results.values())] for v in variants]
        parts.append(f"{title}:\n\n" + table(["variant", *(f"N = {n}" for n in results)], rows))
    return "\n\n".join(parts)


def draw(results: dict[int, dict[str, dict[str, float]]], plot: Any) -> None:
    """Draw step times over stock's and peaks, over N."""
    for i, (name, label) in enumerate(
        [("ratio_to_stock", "step time over stock's"), ("peak_activations_MB", "peak of activations, MB")]
    ):
        plot.subplot(1, 2, i + 1)
        for variant in next(iter(results.values())):
            points = [(n, row[variant][name]) for n, row in results.items() if name in row[variant]]
            if points:
                plot.plot(*zip(*points, strict=True), marker="o", label=variant)
        plot.xscale("log", base=2)
        plot.xlabel("N")
        plot.ylabel(label)
    plot.yscale("log")
    plot.subplot(1, 2, 1)
    plot.legend(fontsize=6)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="micro-batches of a step")
    parser.add_argument("--devices", type=int, default=2, help="processes")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument(
        "--rounds", type=int, default=9, help="turns of each variant at most; the first one more warms up"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where results go")
    parser.set_defaults(minutes=9.0, hidden=512)
    options = options_of(parser)
    warnings.filterwarnings("ignore")
    results = {n: measure(options, n, options.minutes * n / sum(options.n)) for n in options.n}
    write(
        options.out,
        vars(options),
        {str(n): row for n, row in results.items()},
        tables(results),
        lambda p: draw(results, p),
    )


if __name__ == "__main__":
    main()
