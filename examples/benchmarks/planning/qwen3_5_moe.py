"""What the planner predicts for a large mixture of experts in its published sizes, and what drives the gain.

Qwen3.5-35B-A3B (transformers' default sizes of ``qwen3_5_moe``) on 8 devices without expert parallelism: a micro-batch
of 4 sequences is cut into chunks of 2. Nothing is allocated; run it from the root of the repository::

    python examples/benchmarks/planning/qwen3_5_moe.py
"""

from __future__ import annotations

import argparse
import warnings

import torch
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_chunkmbs.coverage import Plans
from lightning_chunkmbs.dtypes import Dtypes
from lightning_chunkmbs.plan_report import table
from lightning_chunkmbs.planner import Hardware, Planner
from lightning_chunkmbs.plans import ChunkMBSPlan

KEYWORDS = ["position_embeddings", "position_ids", "attention_mask"]


class Module(LightningModule):
    """The text model with the loss Hugging Face computes."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        config = transformers.Qwen3_5MoeTextConfig(num_hidden_layers=layers, use_cache=False)
        self.model = transformers.Qwen3_5MoeForCausalLM(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def planner(options: argparse.Namespace) -> Planner:
    """Measure the model once."""
    with torch.device("meta"):
        module = Module(options.layers)
    batch = torch.empty(options.micro_batch, options.tokens, dtype=torch.long, device="meta")
    plan = ChunkMBSPlan(apply_modules=["model.layers.{*}"], chunk_mbs=2, chunk_kwarg_names=KEYWORDS)
    return Planner(
        module,
        Plans(chunkmbs_plan=plan),
        batch,
        ranks=options.devices,
        dtypes=Dtypes(shards=torch.bfloat16, reduce=torch.float32),
        optimizers=module.configure_optimizers,
    )


def main() -> None:
    """Predict and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--micro_batch", type=int, default=4)
    parser.add_argument("--chunk_mbs", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--tflops", type=float, nargs="+", default=[50, 100, 200])
    parser.add_argument("--link_gbps", type=float, nargs="+", default=[50, 100, 200, 400, 800, 1600])
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    made = planner(options)
    hardware = Hardware(devices=options.devices, memory=80 * 2**30)
    print(table(made, made.plan(hardware, options.chunk_mbs), hardware))
    print("\ngain over stock accumulation (%), by link (10^9 bits a second) and speed (10^12 operations a second)")
    print("| link | " + " | ".join(f"{t:g}" for t in options.tflops) + " |")
    print("|---" * (len(options.tflops) + 1) + "|")
    for link in options.link_gbps:
        cells = []
        for tflops in options.tflops:
            at = Hardware(devices=options.devices, memory=hardware.memory, link_gbps=link, tflops=tflops)
            cells.append(f"{100 * made.time(options.chunk_mbs, at)[0].gain:.0f}")
        print(f"| {link:g} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
