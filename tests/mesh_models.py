"""Models and runs on four processes in two dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_chunkmbs import ChunkMBSStrategy
from tests.collectives import Collectives
from tests.expert_models import ExpertBlock, Experts
from tests.models import Block, Loader, chunked, fit, full, make_trainer, optimizer_for
from tests.one_window import Windowed, assert_close, build, micro_batches
from tests.structure_models import Decoder

WORLD = 4
CLIP = 0.05


class Scaled(Decoder):
    """With a 0-dim parameter, which every rank holds whole."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__(block=block)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        return super().loss(self.scale * x, tokens)


class ScaledMixture(Scaled):
    """With experts in its blocks."""

    def __init__(self) -> None:
        super().__init__(ExpertBlock)


class Meshed(Windowed):
    """Trains a net, with tensor parallelism where there is a mesh for it; the first rank's initial values count."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(build(Scaled) if net is None else net)
        self.norms: list[float] = []
        self.counted: Collectives | None = None
        self.all_reduces: list[int] = []  # counted at the beginning of the first window and at its end
        self._whole = False

    def configure_model(self) -> None:
        tensor = self.device_mesh["tensor_parallel"]
        if self._whole:
            return
        self._whole = True
        data = self.device_mesh["data_parallel"]
        other_replica = dist.get_rank() // 2 == 1 and data.size() == WORLD
        if other_replica or tensor.get_local_rank() == 1:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter += 1
        if tensor.size() > 1:
            for layer in (module for module in self.net.modules() if hasattr(module, "up")):
                parallelize_module(layer, tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            for experts in (module for module in self.net.modules() if isinstance(module, Experts)):
                parallelize_module(experts.each[0], tensor, ColwiseParallel(output_layouts=Replicate()))
            # Outside blocks, in the root group.
            parallelize_module(self.net, tensor, {"head": ColwiseParallel(output_layouts=Replicate())})

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._note_all_reduces(0)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._note_all_reduces(1)
        super().on_before_optimizer_step(optimizer)
        self.norms.append(self.trainer.strategy.gradient_norm().item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_for(self)

    def _note_all_reduces(self, noted: int) -> None:
        if self.counted is not None and len(self.all_reduces) == noted:
            self.all_reduces.append(self.counted.all_reduces)


def ranks_with_data(mesh: str) -> int:
    return WORLD if mesh == "replicas" else WORLD // 2


def data_of(mesh: str) -> list[list[Tensor]]:
    """The micro-batches of each rank with data of its own: different sizes, so different numbers of chunks."""
    all_sizes = [[3, 1, 2, 3], [5, 2, 1, 4], [1, 1, 6, 2], [2, 3, 3, 1]]
    return [micro_batches(sizes, seed=i) for i, sizes in enumerate(all_sizes[: ranks_with_data(mesh)])]


def own_part(mesh: str, data: list[list[Tensor]]) -> list[Tensor]:
    return data[dist.get_rank() // (WORLD // ranks_with_data(mesh))]


def own_data(mesh: str) -> list[Tensor]:
    return own_part(mesh, data_of(mesh))


def strategy_of(mesh: str, **options: Any) -> ChunkMBSStrategy:
    """Chunks of two samples, over replicas × shards or shards × tensor parallelism."""
    plan = options.pop("fsdp_plan", {})
    if mesh == "replicas":
        return chunked(2, fsdp_plan={"replicate_size": 2, **plan}, **options)
    return chunked(2, fsdp_plan=plan, tensor_parallel_size=2, **options)


def train_plainly(net: nn.Module, data: list[list[Tensor]], n: int, epochs: int) -> list[float]:
    """The oracle: one process, windows of ``n`` micro-batches, clipped; returns the norms before clipping."""
    optimizer, norms = optimizer_for(net), []
    for _ in range(epochs):
        for start in range(0, len(data[0]), n):
            optimizer.zero_grad()
            for batches in data:
                for batch in batches[start : start + n]:
                    (net(batch) / (n * len(data))).backward()
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), CLIP).item())
            optimizer.step()
    return norms


def values(module: Windowed) -> dict[str, Tensor]:
    return {name: full(p).detach().clone() for name, p in module.net.named_parameters()}


def clip_and_resume(
    kind: type[nn.Module], data: list[list[Tensor]], mine: list[Tensor], strategy: Callable[[], Any], n: int, path: str
) -> Meshed:
    """Two epochs of clipped windows equal one process, and so they do when the second is resumed from a checkpoint.

    Args:
        kind: what is trained.
        data: for each rank with data its micro-batches.
        mine: this rank's.
        strategy: makes a strategy.
        n: micro-batches of a window.
        path: where the checkpoint goes.

    Returns:
        The module of the run that was not interrupted.
    """
    options = {"accumulate_grad_batches": n, "gradient_clip_val": CLIP}
    net, whole, first, second = build(kind), *(Meshed(build(kind)) for _ in range(3))
    norms = train_plainly(net, data, n, 2)
    assert min(norms) > 2 * CLIP, "nothing is clipped"
    fit(whole, mine, strategy(), max_epochs=2, **options)
    assert whole.norms == pytest.approx(norms, rel=1e-4)
    assert_close(values(whole), {name: p.detach() for name, p in net.named_parameters()}, 2e-6)
    fit(first, mine, strategy(), **options).save_checkpoint(path)
    dist.barrier()
    make_trainer(strategy(), max_epochs=2, **options).fit(second, Loader(mine), ckpt_path=path)
    assert len(second.norms) == len(norms) // 2
    assert_close(values(second), values(whole), 0)
    assert list(second.net.state_dict()) == list(net.state_dict())
    return whole
