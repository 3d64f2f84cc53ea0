"""Loss curves of the quickstart model in several precisions, each with the same data and the same initial values.

One precision and seed per launch, since a launch starts the processes; the table is made from all results. Run it from
the root of the repository::

    for run in "32-true 1" "32-true 2" "bf16-mixed 1" "bf16-true 1"; do
        set -- $run; python examples/benchmarks/precision/training.py --precision $1 --seed $2
    done
    python examples/benchmarks/precision/training.py --table
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # `examples` is no installed package

from examples.finetune_lm.data import ByteText
from examples.finetune_lm.module import CausalLM
from lightning_chunkmbs import ChunkMBSPlan, ChunkMBSStrategy

RESULTS = Path(__file__).parent / "results" / "training.json"


class Recorded(CausalLM):
    """The quickstart's module, with the loss of every step, averaged over the processes."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().float(), reduce_op="mean")))
        return loss


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train and return the losses and the seconds it took."""
    pl.seed_everything(options.seed)
    # Arguments of the quickstart's blocks (configs/quickstart_cpu.yaml).
    plan = ChunkMBSPlan(
        apply_modules=["model.layers.{*}"],
        chunk_mbs=options.chunk_mbs,
        chunk_kwarg_names=["position_embeddings", "position_ids", "attention_mask"],
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ChunkMBSStrategy(chunkmbs_plan=plan),
        precision=options.precision,
        max_steps=options.steps,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    module, data = Recorded(), ByteText(length=128, batch_size=8)
    start = time.perf_counter()
    trainer.fit(module, data)
    seconds = time.perf_counter() - start
    return {"losses": module.losses, "seconds": seconds, "torch": torch.__version__}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return mean losses over stretches of ten steps as a Markdown table, with the seconds of each run."""
    steps = len(next(iter(results.values()))["losses"])
    ends = [end for end in (10, 50, 100, 150, steps) if end <= steps]
    lines = ["| run | " + " | ".join(f"{end - 9}–{end}" for end in ends) + " | seconds |"]
    lines.append("|---" * (len(ends) + 2) + "|")
    for name, result in results.items():
        means = [statistics.mean(result["losses"][end - 10 : end]) for end in ends]
        lines.append(f"| {name} | " + " | ".join(f"{mean:.3f}" for mean in means) + f" | {result['seconds']:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Train once, or print the table of all results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--chunk-mbs", type=int, default=2, help="samples per chunk of a batch of 8 per process")
    parser.add_argument("--table", action="store_true", help="print the results that there are")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    result = None if options.table else train(options)
    if result is not None and torch.distributed.get_rank() != 0:
        return
    results: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if result is not None:
        RESULTS.parent.mkdir(exist_ok=True)
        results[f"{options.precision}, seed {options.seed}"] = result
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results), flush=True)


if __name__ == "__main__":
    main()
