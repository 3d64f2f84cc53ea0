"""Draw when a step gathers, runs and recomputes its chunks, from a profile of a real step of four micro-batches.

Two processes; writes ``timeline.svg`` and, for chrome://tracing or Perfetto, ``trace.json`` where ``--trace`` says::

    python -m examples.timeline.draw
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from examples.benchmarks.common import BLOCKS, Network
from lightning_chunkmbs import ChunkMBSPlan, ChunkMBSStrategy

COLORS = {"gather": "#d08770", "chunk": "#5e81ac", "recomputed chunk": "#a3be8c", "reduce": "#b48ead"}


class Range(NamedTuple):
    """Something that a trace shows, in milliseconds from its first range on."""

    kind: str
    row: str
    start: float
    length: float


class Profiled(pl.LightningModule):
    """Trains a network, and profiles the last optimizer step."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Network(options.hidden, options.blocks)
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return self.net.loss(tokens)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.trainer.num_training_batches - 1:  # where the last window runs
            self.profile.start()

    def on_train_end(self) -> None:
        self.profile.stop()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def train(options: argparse.Namespace) -> torch.profiler.profile:
    """Train two optimizer steps of ``n`` micro-batches and return the profile of the second."""
    plan = ChunkMBSPlan(apply_modules=[BLOCKS], chunk_mbs=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ChunkMBSStrategy(chunkmbs_plan=plan),
        accumulate_grad_batches=options.n,
        max_epochs=1,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    module = Profiled(options)
    trainer.fit(module, DataLoader(torch.randint(0, 256, (4 * options.n, options.tokens)), batch_size=1))
    return module.profile


def ranges(trace: dict[str, Any]) -> list[Range]:
    """Return what a Chrome trace shows of chunks and of FSDP2's collectives, in order."""
    events = sorted((e for e in trace["traceEvents"] if e.get("ph") == "X"), key=lambda e: e["ts"])
    transfers = iter([e for e in events if e["name"] == "gloo:all_gather"])
    found = []
    for event in events:
        if named := _named(event["name"]):
            # FSDP2's range is where it asks for a gather; gloo's threads bring it in that order.
            event = next(transfers) if named[0] == "gather" else event
            found.append(Range(*named, event["ts"] / 1e3, event["dur"] / 1e3))
    start = found[0].start
    return [r._replace(start=r.start - start) for r in found]


def _named(name: str) -> tuple[str, str] | None:
    """Return kind and row of a range by its name, if it is one to be drawn."""
    if match := re.fullmatch(r"ChunkMBS::block \((.+)\) chunk \d+/\d+(, recomputed)?", name):
        return "recomputed chunk" if match[2] else "chunk", _row(match[1])
    if match := re.fullmatch(r"FSDP::(all_gather|post_backward_reduce)(?: \((.*)\))?", name):
        return "gather" if match[1] == "all_gather" else "reduce", _row(match[2] or "")
    return None


def _row(name: str) -> str:
    number = re.search(r"blocks\.(\d+)", name)
    return f"block {number[1]}" if number else "root"


def draw(found: list[Range], path: Path) -> None:
    """Draw a row for each block and one for the root."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sorted({r.row for r in found})
    figure, axes = pyplot.subplots(figsize=(10, 0.5 * len(rows) + 1.2))
    for kind, color in COLORS.items():
        bars = [r for r in found if r.kind == kind]
        y, left, length = [rows.index(r.row) for r in bars], [r.start for r in bars], [r.length for r in bars]
        axes.barh(y, length, left=left, height=0.7, color=color, edgecolor="white", linewidth=0.4, label=kind)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of one optimizer step")
    axes.legend(ncols=len(COLORS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Train, and draw on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "timeline.svg")
    parser.add_argument("--trace", type=Path, help="where the Chrome trace is kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    profile = train(options)
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            path = options.trace or Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            found = ranges(json.loads(path.read_text()))
        draw(found, options.out)
        print({kind: sum(r.kind == kind for r in found) for kind in COLORS}, flush=True)


if __name__ == "__main__":
    main()
