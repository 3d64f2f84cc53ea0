"""Bytes of an optimizer's state and step, measured on fake shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from .storages import StorageCounter

__all__: list[str] = []


@dataclass(frozen=True, kw_only=True)
class OptimizerBytes:
    """Bytes of a rank.

    Attributes:
        state: the optimizer's state.
        step: most that is alive beside while it steps.
        name: the optimizers' classes.
        assumed: why they were assumed and not taken from the module; None if they are the module's.
    """

    state: int
    step: int
    name: str
    assumed: str | None = None


def measure_optimizer(
    mode: FakeTensorMode,
    module: nn.Module,
    make: Callable[[], Any] | None,
    *,
    ranks: int,
    shards: Mapping[str, torch.dtype],
    foreach: bool,
) -> OptimizerBytes:
    """Step optimizers on a rank's shards.

    Args:
        mode: the mode of the module's fake tensors.
        module: the module, on fake tensors.
        make: returns the optimizers, as ``configure_optimizers`` does; None: AdamW over all trainable parameters.
        ranks: over how many ranks parameters are sharded.
        shards: dtypes of the shards by parameters' names.
        foreach: let optimizers that can handle all parameters at once do so.
    """
    dtypes = {id(p): shards[name] for name, p in module.named_parameters()}
    assumed: str | None = "none was given"
    optimizers: list[Optimizer] = []
    with mode:
        if make is not None:
            try:
                optimizers = list(_optimizers(make()))
                assumed = None if optimizers else "configure_optimizers returned none"
            except Exception as error:  # whatever a user's code may need that is not there without a run
                assumed = f"configure_optimizers raised {type(error).__name__}: {error}"
        if not optimizers:
            optimizers = [torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])]
        with StorageCounter() as counter:
            for optimizer in optimizers:
                _shard(optimizer, ranks, dtypes, foreach)
            before = counter.live
            step = 0
            for optimizer in optimizers:
                for _ in range(2):  # the first step makes the state
                    start = counter.mark()
                    optimizer.step()
                step = max(step, counter.peak - start)
            state = counter.live - before
    names = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    return OptimizerBytes(state=state, step=step, name=names, assumed=assumed)


def _optimizers(made: Any) -> Iterator[Optimizer]:
    """Every optimizer in what ``configure_optimizers`` may return."""
    if isinstance(made, Optimizer):
        yield made
    elif isinstance(made, Mapping):
        yield from _optimizers(made.get("optimizer"))
    elif isinstance(made, (list, tuple)):
        for one in made:
            yield from _optimizers(one)


def _shard(optimizer: Optimizer, ranks: int, dtypes: Mapping[int, torch.dtype], foreach: bool) -> None:
    """Give an optimizer a rank's shards in place of its parameters."""
    for group in optimizer.param_groups:
        group["params"] = [_part(p, ranks, dtypes.get(id(p), p.dtype)) for p in group["params"] if p.requires_grad]
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = foreach
    optimizer.state.clear()


def _part(p: Tensor, ranks: int, dtype: torch.dtype) -> Tensor:
    shape = (-(-p.shape[0] // ranks), *p.shape[1:]) if p.ndim else p.shape
    part = nn.Parameter(torch.empty(shape, dtype=dtype, device="cpu"))
    part.grad = torch.empty_like(part)
    return part
