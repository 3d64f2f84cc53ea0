"""One large batch with a large vocabulary: peak memory of a step with three ways to write the loss.

Each way runs in a process of its own, whose peak is its highest resident memory above what it held before the step
(on an accelerator: its allocator's peak)::

    python examples/large_vocabulary/train.py
"""

import argparse
import resource
import subprocess
import sys
import warnings

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightning_chunkmbs import ChunkMBSPlan, ChunkMBSStrategy

HIDDEN = 64
WAYS = ("logits", "linear_cross_entropy", "checkpointed parts")


class LargeVocabulary(pl.LightningModule):
    """Blocks cut the batch by themselves; the loss is what would hold the logits of all of it."""

    def __init__(self, way: str, vocabulary: int) -> None:
        super().__init__()
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": HIDDEN // 2}
        sizes |= {"vocab_size": vocabulary, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN}
        config = Qwen3Config(**sizes, use_cache=False, tie_word_embeddings=False)
        self.model = Qwen3ForCausalLM(config)
        self.way = way

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        hidden = self.model.model(input_ids=tokens).last_hidden_state[:, :-1]
        self.loss = {"logits": whole, "linear_cross_entropy": linear, "checkpointed parts": by_parts}[self.way](
            hidden, self.model.lm_head.weight, tokens[:, 1:]
        )
        return self.loss

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.before = memory(self.device)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.peak = memory(self.device) - self.before
        self.norm = float(self.trainer.strategy.gradient_norm())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The logits of the whole batch, their logarithms and the gradients of both."""
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), targets.flatten())


def linear(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Head and loss in one operation that makes a part of the logits at a time (torch 2.13 and newer)."""
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten(), options=options)


def by_parts(hidden: Tensor, weight: Tensor, targets: Tensor, samples: int = 4) -> Tensor:
    """The same with older torch: parts of the batch, their logits made again in backward."""

    def part(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), targets.flatten(), reduction="sum")

    parts = zip(hidden.split(samples), targets.split(samples), strict=True)
    return sum(checkpoint(part, h, t, use_reentrant=False) for h, t in parts) / targets.numel()


def memory(device: torch.device) -> int:
    """The peak so far, in bytes."""
    if device.type != "cpu":
        return torch.get_device_module(device).max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def train(way: str, options: argparse.Namespace) -> None:
    """Run one step and print what it needed."""
    warnings.filterwarnings("ignore")
    pl.seed_everything(1, verbose=False)
    module = LargeVocabulary(way, options.vocabulary)
    tokens = torch.randint(options.vocabulary, (options.batch, options.length))
    plan = ChunkMBSPlan(
        apply_modules=["model.layers.{*}"],
        chunk_mbs=4,
        chunk_kwarg_names=["position_embeddings", "position_ids", "attention_mask"],
    )
    trainer = pl.Trainer(
        accelerator=options.accelerator,
        devices=1,
        strategy=ChunkMBSStrategy(chunkmbs_plan=plan),
        max_steps=1,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    trainer.fit(module, DataLoader(tokens, options.batch))
    chunks = trainer.strategy.step_report.chunks
    print(
        f"{way:<22}{module.peak / 1e6:>10.0f} MB   loss {module.loss.item():.5f}   gradient norm {module.norm:.5f}   "
        f"{chunks} chunks"
    )


def main() -> None:
    """Start a process for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=65)
    parser.add_argument("--way", choices=WAYS, help="this way only, in this process")
    options = parser.parse_args()
    if options.way:
        train(options.way, options)
        return
    logits = options.batch * (options.length - 1) * options.vocabulary * 4
    print(f"logits of the batch in fp32{logits / 1e6:>5.0f} MB")
    for way in WAYS:
        if way != "linear_cross_entropy" or hasattr(F, way):
            done = subprocess.run([sys.executable, *sys.argv, "--way", way], text=True, capture_output=True)
            if done.returncode:
                sys.exit(done.stderr)
            print(next(line for line in done.stdout.splitlines() if line.startswith(way)))


if __name__ == "__main__":
    main()
