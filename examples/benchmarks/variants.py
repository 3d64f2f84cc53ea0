"""Ways to run the work of one optimizer step, each trained by Lightning with the same model and samples."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from examples.benchmarks.common import BLOCKS, Network
from lightning_chunkmbs import ActivationOffloadPlan, ChunkMBSPlan, ChunkMBSStrategy


class ChunkLoop(nn.Module):
    """What is usually written to cut a batch: cut it, checkpoint each chunk, join what comes out."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([checkpoint(self.block, chunk, use_reentrant=False) for chunk in x.split(1)])


class Module(pl.LightningModule):
    """Trains the network and takes the time of optimizer steps.

    Args:
        net: the network.
        wrap: what stock users shard in place of a block; None: nothing is sharded here.
        last_only: reduce gradients in the last micro-batch only.
    """

    def __init__(self, net: Network, wrap: Callable[[nn.Module], nn.Module] | None, last_only: bool = False) -> None:
        super().__init__()
        self.net, self._wrap, self._last_only = net, wrap, last_only
        self.times: list[float] = []
        self.gradients: dict[str, Tensor] | None = None  # filled once, if it is a dict

    def configure_model(self) -> None:
        if self._wrap is None:
            return
        mesh = self.device_mesh["data_parallel"]
        for i, block in enumerate(self.net.blocks):
            self.net.blocks[i] = fully_shard(self._wrap(block), mesh=mesh)
        fully_shard(self.net, mesh=mesh)
        self._wrap = None

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return self.net.loss(tokens)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        n = self.trainer.accumulate_grad_batches
        if self._last_only and isinstance(self.net, FSDPModule):
            self.net.set_requires_gradient_sync(batch_idx % n == n - 1)
        if batch_idx % n == 0:
            dist.barrier()
            self._start = time.perf_counter()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.gradients == {}:
            for name, p in self.net.named_parameters():
                self.gradients[_plain(name)] = p.grad.full_tensor()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self.times.append(time.perf_counter() - self._start)


def _plain(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace(".block.", ".")


class CommunicatedBytes:
    """Counts the bytes of parameters that all-gathers bring together, and of gradients that reduce-scatters are given.

    Where torch.distributed runs them: stock FSDP2 has no step report.
    """

    def __init__(self) -> None:
        self.gathered = self.reduced = 0
        self._patches = ExitStack()

    def __enter__(self) -> CommunicatedBytes:
        # The first of each pair is that of torch 2.12 and later; the second calls the first there.
        for field, names in {
            "gathered": ("all_gather_single", "all_gather_into_tensor"),
            "reduced": ("reduce_scatter_single", "reduce_scatter_tensor"),
        }.items():
            name = next(name for name in names if hasattr(dist, name))
            self._patches.enter_context(patch.object(dist, name, self._counted(field, getattr(dist, name))))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _counted(self, field: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            # The larger of input and output is the whole of which each rank has a part.
            setattr(self, field, getattr(self, field) + max(t.nbytes for t in tensors))
            return original(*args, **kwargs)

        return call


class Trained:
    """A variant, trained some optimizer steps at a time.

    Args:
        options: has ``devices``, ``hidden``, ``blocks``, ``tokens`` and perhaps ``last_token``.
        accumulate: micro-batches of a step.
        strategy: Lightning's strategy.
        samples: of a micro-batch.
        module: further arguments of :class:`Module`.
    """

    def __init__(
        self, options: argparse.Namespace, accumulate: int, strategy: Any, samples: int, **module: Any
    ) -> None:
        self.module = Module(build(options), **module)
        self.options, self.accumulate, self.samples = options, accumulate, samples
        self.communicated = CommunicatedBytes()
        self.trainer = pl.Trainer(
            accelerator="cpu",
            devices=options.devices,
            strategy=strategy,
            accumulate_grad_batches=accumulate,
            max_steps=0,
            max_epochs=-1,
            **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        )

    def __call__(self, steps: int = 1) -> list[float]:
        """Train ``steps`` optimizer steps and return their times in seconds."""
        count = steps * self.accumulate * self.samples * self.options.devices
        self.trainer.fit_loop.epoch_loop.max_steps = self.trainer.global_step + steps
        self.module.times.clear()
        with CommunicatedBytes() as self.communicated:
            self.trainer.fit(self.module, DataLoader(data(self.options, count), batch_size=self.samples))
        return list(self.module.times)

    def gradients(self) -> dict[str, Tensor]:
        """Train one step and return its gradients, whole."""
        self.module.gradients = {}
        self()
        found, self.module.gradients = self.module.gradients, None
        return found


class ComputeFloor:
    """The same micro-batches on every rank for itself: no sharding, no communication."""

    def __init__(self, options: argparse.Namespace, n: int) -> None:
        self.net, self.n, self.options = build(options), n, options
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)

    def __call__(self) -> list[float]:
        dist.barrier()
        start = time.perf_counter()
        for tokens in data(self.options, self.n).split(1):
            (self.net.loss(tokens, recompute=True) / self.n).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [time.perf_counter() - start]


def build(options: argparse.Namespace) -> Network:
    """Return the network that every variant starts from."""
    torch.manual_seed(0)
    return Network(options.hidden, options.blocks, last_token=getattr(options, "last_token", False))


def data(options: argparse.Namespace, count: int) -> Tensor:
    """Return ``count`` samples, ``[count, tokens]``."""
    return torch.randint(0, 256, (count, options.tokens), generator=torch.Generator().manual_seed(1))


def _stock(options: argparse.Namespace) -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=options.devices, tensor_parallel_size=1)


def _ours(stream: bool = False) -> ChunkMBSStrategy:
    plan = ChunkMBSPlan(apply_modules=[BLOCKS], chunk_mbs=1)
    offload = ActivationOffloadPlan(apply_modules=[BLOCKS], stream_hidden_states=stream)
    return ChunkMBSStrategy(chunkmbs_plan=plan, activation_offload_plan=offload)


STOCK = "stock"
VARIANTS: dict[str, Callable[[argparse.Namespace, int], Trained]] = {
    STOCK: lambda o, n: Trained(o, n, _stock(o), 1, wrap=checkpoint_wrapper),
    "stock, last sync only": lambda o, n: Trained(o, n, _stock(o), 1, wrap=checkpoint_wrapper, last_only=True),
    "one big batch": lambda o, n: Trained(o, 1, _stock(o), n, wrap=checkpoint_wrapper),
    "cut, checkpoint, join": lambda o, n: Trained(o, 1, _stock(o), n, wrap=ChunkLoop),
    "ours, lockstep": lambda o, n: Trained(o, n, _ours(), 1, wrap=None),
    "ours, cut": lambda o, n: Trained(o, 1, _ours(), n, wrap=None),
    "ours, lockstep, streaming": lambda o, n: Trained(o, n, _ours(stream=True), 1, wrap=None),
    "ours, cut, streaming": lambda o, n: Trained(o, 1, _ours(stream=True), n, wrap=None),
}


def is_activation(options: argparse.Namespace) -> Callable[[Tensor], bool]:
    """Tell activations from parameters: a size of theirs is a multiple of the number of tokens.

    Raises:
        ValueError: so is one of a parameter.
    """
    found = {size for p in build(options).parameters() for size in p.shape if size % options.tokens == 0}
    if found:
        raise ValueError(
            f"Activations are told by a size that is a multiple of the tokens, {options.tokens}, and parameters have "
            f"sizes {sorted(found)}. Write --tokens with an odd number."
        )
    return lambda tensor: tensor.is_floating_point() and any(size % options.tokens == 0 < size for size in tensor.shape)


def options_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Add what all variants need to a command's options, read them, and keep to one thread per process.

    The command sets its own defaults of ``hidden`` and ``minutes``.
    """
    parser.add_argument("--hidden", type=int, help="width, a multiple of 64")
    parser.add_argument("--tokens", type=int, default=97, help="tokens of a sample; no parameter has such a size")
    parser.add_argument("--minutes", type=float, help="time to spend; what has begun is brought to its end")
    options = parser.parse_args()
    torch.set_num_threads(1)
    return options
