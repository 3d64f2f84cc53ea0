"""What only an accelerator can show: copies beside compute, memory, ``chunk_mbs: auto``, gradients under slow copies.

One process, one device, sizes of a large model's layers; four to five minutes on one H200::

    python -m examples.benchmarks.gpu_check --json examples/benchmarks/results/gpu_check.json

``--device cpu --hidden 64 --tokens 32 --blocks 2`` runs the same code without one, where the times say nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.benchmarks.common import BLOCKS, Network
from lightning_chunkmbs import ActivationOffloadPlan, ChunkMBSPlan, ChunkMBSStrategy, streams

VOCABULARY = 1024


class Module(pl.LightningModule):
    """Trains the network and notes times, gradients and peak memory of optimizer steps."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Network(options.hidden, options.blocks, VOCABULARY)
        self.times: list[float] = []
        self.keep_gradients = False
        self.gradients: dict[str, Tensor] = {}
        self.exposed: list[float] = []  # seconds, as the step report says
        self.peak = self._allocated = 0

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(tokens).flatten(0, 1).float(), tokens.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            synchronize(self.device)
            if self.device.type != "cpu":
                torch.cuda.reset_peak_memory_stats()
                self._allocated = torch.cuda.memory_allocated()
            self._start = time.perf_counter()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        synchronize(self.device)
        self.times.append(time.perf_counter() - self._start)
        if self.device.type != "cpu":
            self.peak = torch.cuda.max_memory_allocated() - self._allocated
        if self.keep_gradients:
            self.gradients = {name: p.grad.full_tensor().clone() for name, p in self.net.named_parameters()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self.exposed.append(self.trainer.strategy.step_report.exposed_copy_seconds)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


class Trained:
    """One way to train, some optimizer steps of ``n`` micro-batches at a time."""

    def __init__(
        self,
        options: argparse.Namespace,
        n: int,
        *,
        plan: dict[str, Any] | None = None,
        batch: int = 1,
        **strategy: Any,
    ) -> None:
        self.module, self.n, self.batch, self.options = Module(options), n, batch, options
        self.trainer = pl.Trainer(
            accelerator=options.device,
            devices=1,
            precision="bf16-true",
            strategy=ChunkMBSStrategy(
                chunkmbs_plan=ChunkMBSPlan(apply_modules=[BLOCKS], **plan or {"chunk_mbs": 1}), **strategy
            ),
            accumulate_grad_batches=n,
            max_steps=0,
            max_epochs=-1,
            **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        )

    def __call__(self, steps: int) -> list[float]:
        """Train ``steps`` optimizer steps on the same data each time; return their seconds."""
        data = torch.randint(
            0,
            VOCABULARY,
            (steps * self.n * self.batch, self.options.tokens),
            generator=torch.Generator().manual_seed(1),
        )
        self.trainer.fit_loop.epoch_loop.max_steps = self.trainer.global_step + steps
        self.module.times.clear()
        self.trainer.fit(self.module, DataLoader(data, batch_size=self.batch))
        return list(self.module.times)


def offload(**fields: Any) -> dict[str, Any]:
    """The strategy's arguments for offloading with these fields of the plan."""
    return {"activation_offload_plan": ActivationOffloadPlan(apply_modules=[BLOCKS], **fields)}


@contextmanager
def slow_copies(options: argparse.Namespace) -> Iterator[None]:
    """Let copy streams sleep before each copy, so that whoever does not wait reads old memory."""
    copy = streams._DeviceStream.copy

    def sleep_and_copy(self: Any, dst: Tensor, src: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(options.sleep_cycles)
        copy(self, dst, src)

    with patch.object(streams._DeviceStream, "copy", sleep_and_copy):
        yield


def gradients(options: argparse.Namespace, n: int, slow: bool = False, **strategy: Any) -> dict[str, Tensor]:
    """Gradients of the first optimizer step."""
    with slow_copies(options) if slow and options.device != "cpu" else nullcontext():
        trained = Trained(options, n, **strategy)
        trained.module.keep_gradients = True
        trained(1)
    return trained.module.gradients


def same_gradients(options: argparse.Namespace) -> dict[str, bool]:
    """Whether gradients are bit for bit those without offload, with copies that are slow."""
    expected = gradients(options, 4, enable_activation_offload=False)
    kinds = {"offload": {}, "streaming": offload(stream_hidden_states=True), "pageable": offload(pin_memory=False)}
    return {
        kind: all(torch.equal(g, expected[n]) for n, g in gradients(options, 4, slow=True, **how).items())
        for kind, how in kinds.items()
    }


def step_times(options: argparse.Namespace) -> tuple[dict[str, float], float]:
    """Median seconds of an optimizer step of 8 micro-batches, each way in turns, and of copies exposed in it."""
    ways = {
        "lockstep": Trained(options, 8),
        "lockstep, activations on the device": Trained(options, 8, enable_activation_offload=False),
        "lockstep, streaming": Trained(options, 8, **offload(stream_hidden_states=True)),
        "one after the other": Trained(options, 8, plan={"max_lockstep": 1}),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for round_ in range(options.rounds + 1):
        for way, trained in ways.items():
            times = trained(2)
            seconds[way] += times if round_ else []  # the first round warms up
    exposed = statistics.median(ways["lockstep"].module.exposed[2:])
    return {way: statistics.median(times) for way, times in seconds.items()}, exposed


def peaks(options: argparse.Namespace) -> dict[str, dict[int, int]]:
    """Peak bytes of a step beyond what lived before it, by number of micro-batches."""
    found: dict[str, dict[int, int]] = {}
    for way, how in {"offload": {}, "streaming": offload(stream_hidden_states=True)}.items():
        found[way] = {}
        for n in (4, 16):
            trained = Trained(options, n, **how)
            trained(2)
            found[way][n] = trained.module.peak
    return found


@contextmanager
def memory_of(options: argparse.Namespace) -> Iterator[None]:
    """Let the process have a part of its device; a CPU tells what accelerators tell."""
    part = int(options.auto_mib * 2**20)
    if options.device == "cpu":
        told = {"mem_get_info": lambda _: (part, part), "memory_reserved": lambda _: 0, "memory_allocated": lambda _: 0}
        with patch.multiple(torch.cpu, create=True, **told):
            yield
        return
    torch.cuda.set_per_process_memory_fraction(part / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def chosen(options: argparse.Namespace) -> dict[str, int]:
    """What ``chunk_mbs: auto`` takes of a large batch in a part of the device, and what that takes of the part."""
    with memory_of(options):
        trained = Trained(options, 2, plan={"chunk_mbs": "auto"}, batch=options.auto_batch)
        trained(2)
    report = trained.trainer.strategy.step_report
    on_device = options.device != "cpu"
    return {
        "micro-batch": options.auto_batch,
        "chunks of a block call": report.chunks // report.blocks,
        "bytes of the device's part": int(options.auto_mib * 2**20),
        "peak bytes allocated": trained.module.peak + trained.module._allocated if on_device else 0,
        "peak bytes reserved": torch.cuda.max_memory_reserved() if on_device else 0,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sleep-cycles", type=int, default=20_000_000)
    parser.add_argument("--auto-batch", type=int, default=48)
    parser.add_argument("--auto-mib", type=float, default=32 * 1024)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.use_deterministic_algorithms(True, warn_only=True)
    auto, same, found, (times, exposed) = (
        chosen(options),
        same_gradients(options),
        peaks(options),
        step_times(options),
    )
    hidden_state = options.tokens * options.hidden * 2
    kept = times["lockstep, activations on the device"]
    result = {
        "gradients bitwise equal to those without offload": same,
        "hidden states per added micro-batch": {
            way: round((by_n[16] - by_n[4]) / 12 / hidden_state, 3) for way, by_n in found.items()
        },
        "chunk_mbs: auto": auto,
        "peak bytes of a step": found,
        "seconds per step": {way: round(t, 4) for way, t in times.items()},
        "exposed copies, share of the step": round((times["lockstep"] - kept) / times["lockstep"], 4),
        "exposed copies, share of the step as its report counts": round(exposed / times["lockstep"], 4),
        "lockstep over one after the other": round(times["lockstep"] / times["one after the other"], 4),
        "environment": {
            "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor(),
            "torch": torch.__version__,
            **{k: v for k, v in vars(options).items() if k in ("hidden", "tokens", "blocks", "rounds")},
        },
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
