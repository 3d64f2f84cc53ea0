"""Relative error of gradients against fp64: ours, and FSDP2 with the same policy and a reduction per micro-batch.

Every variant computes the same samples one by one from the same values, so that they differ in how gradients are added
up and in what is gathered. Run it from the root of the repository::

    python examples/benchmarks/precision/run.py --json examples/benchmarks/precision/results/gradients.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_chunkmbs import ChunkMBSPlan, ChunkMBSStrategy

VOCABULARY, WIDTH, BLOCKS, LENGTH = 64, 32, 2, 8
BF16, FP32 = torch.bfloat16, torch.float32


class RMSNorm(nn.Module):
    """Written out as in Llama, Qwen and others: the mean in fp32, the product in the parameters' dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        high = x if x.dtype is torch.float64 else x.float()
        return self.weight * (high * torch.rsqrt(high.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


NORMS: dict[str, Callable[[], nn.Module]] = {"rms": RMSNorm, "layer": lambda: nn.LayerNorm(WIDTH)}


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = NORMS[norm](), NORMS[norm]()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Network(nn.Module):
    """Embedding, blocks, norm, head; its forward returns the mean loss of a batch of tokens."""

    norm_kind = "rms"

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(self.norm_kind) for _ in range(BLOCKS))
        self.norm, self.head = NORMS[self.norm_kind](), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        logits = logits if logits.dtype is torch.float64 else logits.float()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Module(pl.LightningModule):
    """Keeps the gradients of its one optimizer step."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.gradients: dict[str, Tensor] = {}
        self.chunks = 0

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return self.net(tokens)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients = gradients_of(self.net)

    def on_train_batch_end(self, *_: Any) -> None:
        self.chunks = self.trainer.strategy.step_report.chunks

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def gradients_of(net: nn.Module) -> dict[str, Tensor]:
    """Return all gradients, whole and in fp64."""
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {n: (g.full_tensor() if isinstance(g, DTensor) else g).double() for n, g in grads.items()}


def samples_of(seed: int, count: int, rank: int) -> Tensor:
    """Return a rank's samples, ``[count, LENGTH]``."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(VOCABULARY, (count, LENGTH), generator=generator)


def exact(seed: int, count: int, precision: str) -> dict[str, Tensor]:
    """Return the gradients in fp64, of the samples of all ranks, at the values that are trained."""
    net = Network(seed)
    net = (net.to(BF16) if precision == "bf16-true" else net).double()
    every = [samples_of(seed, count, rank) for rank in range(dist.get_world_size())]
    net(torch.cat(every)).backward()
    return gradients_of(net)


def ours(seed: int, count: int, precision: str, *, lockstep: bool, naive: bool = False) -> dict[str, Tensor]:
    """Return the gradients of one step of the strategy.

    Args:
        seed: chooses values and samples.
        count: samples of a rank, each a chunk of its own.
        precision: the Trainer's.
        lockstep: each sample is a micro-batch of its own; else all are one batch, which is cut.
        naive: leave the sums over chunks in the parameters' dtype.
    """
    samples = samples_of(seed, count, dist.get_rank() if dist.is_initialized() else 0)
    batches = samples.split(1 if lockstep else count)
    module = Module(Network(seed))
    left = patch("lightning_chunkmbs.fsdp2.accumulate_in_fp32", lambda _: None) if naive else nullcontext()
    with left:
        trainer_of(precision, len(batches)).fit(module, Batches(list(batches)))
    if module.chunks != BLOCKS * count:
        raise AssertionError(f"{module.chunks} chunks ran, not one for each sample and block")
    return module.gradients


class Batches:
    """Yields ready batches, this rank's."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def trainer_of(precision: str, accumulate: int, devices: int = 2) -> pl.Trainer:
    """Return a quiet Trainer for one optimizer step."""
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=ChunkMBSStrategy(chunkmbs_plan=ChunkMBSPlan(apply_modules=["net.blocks.{*}"], chunk_mbs=1)),
        precision=precision,
        accumulate_grad_batches=accumulate,
        max_epochs=1,
        use_distributed_sampler=False,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )


def each_reduced(seed: int, count: int, precision: str, *, policy: MixedPrecisionPolicy) -> dict[str, Tensor]:
    """Return the gradients of FSDP2 alone, with a backward pass and a reduction for each sample."""
    net = Network(seed)
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    if precision == "bf16-true":
        net.to(BF16)
    elif precision == "bf16-mixed":
        autocast = lambda: torch.autocast("cpu", BF16, cache_enabled=False)  # noqa: E731
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*net.blocks, net):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for sample in samples_of(seed, count, dist.get_rank()).split(1):
        with autocast():
            loss = net(sample)
        (loss / count).backward()
    return gradients_of(net)


SAME = {
    "bf16-mixed": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, cast_forward_inputs=False),
    "bf16-true": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, cast_forward_inputs=False),
}


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the norm of all differences over the norm of all expected gradients."""
    if found.keys() != expected.keys():
        raise AssertionError(f"gradients of other parameters: {found.keys() ^ expected.keys()}")
    wrong = sum((found[n] - expected[n]).square().sum() for n in expected)
    return float((wrong / sum(g.square().sum() for g in expected.values())).sqrt())


def variants(precision: str, *, lockstep: bool) -> dict[str, Callable[[int, int], dict[str, Tensor]]]:
    """Return what is compared."""
    found: dict[str, Callable[[int, int], dict[str, Tensor]]] = {
        "ours": lambda seed, count: ours(seed, count, precision, lockstep=lockstep),
        "left in bf16": lambda seed, count: ours(seed, count, precision, lockstep=lockstep, naive=True),
        "same policy": lambda seed, count: each_reduced(seed, count, precision, policy=SAME[precision]),
    }
    # Lightning's own groups have no policy: parameters are gathered and gradients reduced in the shards' dtype.
    found["stock"] = lambda seed, count: each_reduced(seed, count, precision, policy=MixedPrecisionPolicy())
    return found


def measure(
    precision: str, count: int, seeds: int, *, lockstep: bool, only: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """Return each variant's errors by seed, and the ratios of the mean of ours to the others'."""
    runs = variants(precision, lockstep=lockstep)
    runs = {name: run for name, run in runs.items() if only is None or name in only}
    errors: dict[str, list[float]] = {name: [] for name in runs}
    for seed in range(seeds):
        found = {name: run(seed, count) for name, run in runs.items()}
        expected = exact(seed, count, precision)
        for name, gradients in found.items():
            errors[name].append(error(gradients, expected))
    mean = {name: statistics.mean(values) for name, values in errors.items()}
    return {"errors": errors, "mean": mean, "ratio": {name: mean["ours"] / value for name, value in mean.items()}}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    names = list(next(iter(results.values()))["mean"])
    heads = [*names, "ours / same policy", "ours / stock"]
    lines = ["| run | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name, result in results.items():
        cells = [f"{result['mean'][n]:.2e}" for n in names]
        cells += [f"{result['ratio'][n]:.3f}" for n in ("same policy", "stock")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="*", default=[1, 8, 64, 512], help="chunks of one batch")
    parser.add_argument("--n", type=int, nargs="*", default=[64], help="micro-batches")
    parser.add_argument("--precision", nargs="+", default=["bf16-mixed", "bf16-true"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--norm", choices=NORMS, default="rms")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    Network.norm_kind = options.norm
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    ours(0, 1, "32-true", lockstep=False)  # starts the processes
    start, results = time.perf_counter(), {}
    for precision in options.precision:
        for count, lockstep in [*((c, False) for c in options.chunks), *((n, True) for n in options.n)]:
            name = f"{precision}, {count} {'micro-batches' if lockstep else 'chunks'}"
            results[name] = measure(precision, count, options.seeds, lockstep=lockstep)
    if dist.get_rank() == 0:
        print(f"relative error of gradients, mean over {options.seeds} seeds")
        print(table(results), f"\n{time.perf_counter() - start:.0f} s", flush=True)
        if options.json:
            environment = {"torch": torch.__version__, "lightning": pl.__version__, "python": platform.python_version()}
            settings = {k: str(v) for k, v in vars(options).items() if k != "json"}
            content = {"environment": environment, "settings": settings, "results": results}
            options.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
