"""FSDP2 groups: which parameters are gathered and reduced together, and one call of a block for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from .dtypes import Dtypes
from .fsdp2 import follow_shards, fsdp_state
from .prefetch import Prefetch
from .unused import Unused


def shard(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    further: Sequence[nn.Module],
    nested: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool,
    dtypes: Dtypes,
    cpu_offload: bool,
) -> None:
    """Put each block, each further or nested module and what is left of ``root`` into an FSDP2 group of its own.

    Modules that are sharded already keep their group. 0-dim parameters stay whole (FSDP2 refuses them).

    Args:
        root: the LightningModule.
        blocks: blocks.
        further: modules outside the blocks, inner ones before outer ones.
        nested: modules inside blocks, inner ones before outer ones.
        mesh: data-parallel mesh, 1-dimensional or replicate × shard.
        reshard_after_forward: whether blocks are gathered again for backward.
        dtypes: dtypes of what is gathered and reduced.
        cpu_offload: keep shards, their gradients and optimizer state on the host.
    """
    whole = {p for p in root.parameters() if p.ndim == 0 and not isinstance(p, DTensor)}
    # Pinned memory is an accelerator's: torch has none without.
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy()
    for module in (*nested, *blocks, *further, root):
        if not isinstance(module, FSDPModule):
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=reshard_after_forward and module not in further and module is not root,
                mp_policy=dtypes.policy(casts=module in further),
                offload_policy=offload,
                ignored_params=whole,
            )


def gather_around(
    prefetch: Prefetch,
    unused: Unused,
    module: nn.Module,
    body: Callable[[list[Tensor]], Any],
    tensors: list[Tensor],
    *,
    idle: bool = False,
) -> Any:
    """Run ``body(tensors)`` as one forward call of ``module`` for FSDP2, whose hooks were taken off.

    An ``idle`` one only takes part in a call of other ranks; what gradients it gives are zeros.
    """
    state = fsdp_state(module)
    prefetch.before_forward(module)
    with no_inference():
        (tensors,), _ = state._pre_forward(module, (tensors,), {})
        follow_shards(module)
    output = body(unused.completed(module, tensors, idle=idle))
    prefetch.before_backward(module, output)
    with no_inference():
        return state._post_forward(module, (tensors,), output)


@contextmanager
def no_inference() -> Iterator[None]:
    """Leave inference mode: what FSDP2 gathers in it could not be used in training any more."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
