"""Step time over the bandwidth between two nodes: stock accumulation, what one writes by hand, and ours.

The nodes are network namespaces on this machine (Linux, root); see README.md. From the root of the repository::

    python -m examples.benchmarks.slow_link.run
"""

from __future__ import annotations

import argparse
import json
import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from examples.benchmarks.two_nodes import TwoNodes

ROOT = Path(__file__).resolve().parents[3]
RESULTS = Path(__file__).parent / "results" / "slow_link.json"
OURS = "ours, lockstep"


def launch(options: argparse.Namespace) -> None:
    """Run the worker on both nodes until it has written the results.

    Raises:
        RuntimeError: no nodes can be made here, or the worker failed on one.
    """
    env = {"SLOW_LINK": json.dumps(vars(options) | {"devices": 2, "json": str(options.json)}), "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with TwoNodes() as nodes:
        commands = [nodes.torchrun(node, "-m", "examples.benchmarks.slow_link.worker") for node in (0, 1)]
        running = [nodes.start(node, commands[node], options.timeout, env, cwd=ROOT) for node in (0, 1)]
        while any(process.poll() is None for process in running):
            if any(process.returncode for process in running):
                break  # the other one would wait for it; leaving ends it
            time.sleep(0.1)
        if failed := [node for node, process in enumerate(running) if process.returncode]:
            raise RuntimeError(
                f"The worker failed on node {failed[0]} with status {running[failed[0]].returncode} (124: it took "
                f"longer than --timeout {options.timeout:g}); its output is above."
            )


def bound(row: dict[str, Any]) -> float:
    """Return how many times faster than stock ours could be, were a step the sum of computing and sending."""
    compute = row["variants"]["compute floor"]["ms"] / 1e3
    stock, ours = (row["variants"][name]["sent_MB"] * 8e-3 / row["gbit"] for name in ("stock", OURS))
    return (compute + stock) / (compute + ours)


def speed_up(row: dict[str, Any], name: str = OURS) -> float:
    """Return stock's step time over that of a variant."""
    return row["variants"]["stock"]["ms"] / row["variants"][name]["ms"]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as Markdown: seconds per step (MB that a node sends), and stock's time over ours."""
    names = list(rows[0]["variants"])
    lines = [
        "| Gbit/s | N | " + " | ".join(names) + " | stock / ours | predicted | bound |",
        "|---" * (len(names) + 5) + "|",
    ]
    for row in sorted(rows, key=lambda row: (row["gbit"], row["n"])):
        cells = [f"{v['ms'] / 1e3:.2f} ({v['sent_MB']:.0f})" for v in row["variants"].values()]
        ends = [f"{ratio:.2f}" for ratio in (speed_up(row), row["predicted"], bound(row))]
        lines.append(f"| {row['gbit']:g} | {row['n']} | " + " | ".join(cells + ends) + " |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the speed-up and its bound over the bandwidth."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for i, n in enumerate(sorted({row["n"] for row in rows})):
        mine = sorted((row for row in rows if row["n"] == n), key=lambda row: row["gbit"])
        x = [row["gbit"] for row in mine]
        axes.plot(x, [speed_up(row) for row in mine], "o-", color=f"C{i}", label=f"N = {n}")
        axes.plot(x, [bound(row) for row in mine], "--", color=f"C{i}", label=f"N = {n}, bound")
    axes.set(xscale="log", xlabel="Gbit/s between two nodes", ylabel="stock's step time / lockstep's", ylim=(0, None))
    axes.set_xticks(x, [f"{value:g}" for value in x])
    axes.minorticks_off()
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print a table, and draw where matplotlib is installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, nargs="+", default=[1, 4, 8], help="micro-batches per optimizer step")
    parser.add_argument("--gbit", type=float, nargs="+", default=[0.2, 1, 5], help="10^9 bits per second and direction")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96, help="tokens per micro-batch")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps of a variant before the next one's turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns at each bandwidth")
    parser.add_argument("--timeout", type=float, default=900, help="seconds after which the workers are ended")
    parser.add_argument("--json", type=Path, default=RESULTS, help="results; the plot gets the same name, in .png")
    options = parser.parse_args()
    options.json = options.json.resolve()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    launch(options)
    rows = json.loads(options.json.read_text())["rows"]
    print(table(rows))
    if find_spec("matplotlib"):
        plot(rows, options.json.with_suffix(".png"))
    else:
        print("No plot: matplotlib is not installed (pip install -e '.[bench]').")


if __name__ == "__main__":
    main()
