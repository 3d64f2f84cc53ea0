"""Parameters that several ranks hold: 0-dim ones, which FSDP2 refuses to shard, and the shards of replicas."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .dtypes import accumulate_in_fp32, set_gradient_dtype
from .meshes import Meshes


class ReplicatedParameters:
    """0-dim parameters: every rank holds them, and their gradients are averaged over the ranks.

    Args:
        root: the LightningModule, after sharding.
        meshes: what its dimensions of devices are for.
    """

    def __init__(self, root: nn.Module, meshes: Meshes) -> None:
        self._root = root
        self._meshes = meshes
        self._group = meshes.data.get_group()

    @property
    def _parameters(self) -> list[nn.Parameter]:
        # Looked up live: `Module.to` may replace parameters.
        return [p for p in self._root.parameters() if p.ndim == 0 and not isinstance(p, DTensor)]

    @torch.no_grad()
    def broadcast(self) -> None:
        """Give every rank the values of the first rank, and shards those of the first replica.

        Replicas that began with other values (each rank has its own random numbers) would never meet.
        """
        for whole in self._parameters:
            dist.broadcast(whole, 0)
        parameters: list[torch.Tensor] = list(self._root.parameters())
        for parameter in parameters:
            if isinstance(parameter, DTensor):
                for group in self._meshes.groups_holding(parameter):
                    dist.broadcast(parameter.to_local(), group=group, group_src=0)

    def accumulate_in_fp32(self) -> None:
        """Let gradients add up in fp32 until :meth:`average_gradients`."""
        for parameter in self._parameters:
            accumulate_in_fp32(parameter)

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average the gradients over the ranks with one all-reduce; a rank without a gradient counts as zero.

        Afterwards they have the parameters' dtype, which optimizers expect.
        """
        parameters = [p for p in self._parameters if p.requires_grad]
        if parameters and self._group.size() > 1:
            self._average(parameters)
        for parameter in parameters:
            if getattr(parameter, "grad_dtype", parameter.dtype) != parameter.dtype:
                set_gradient_dtype(parameter, parameter.dtype)

    def _average(self, parameters: list[nn.Parameter]) -> None:
        used = [p.grad is not None for p in parameters]
        grads = [p.grad if p.grad is not None else torch.zeros_like(p, dtype=p.grad_dtype) for p in parameters]
        flat = torch.stack([g.double() for g in grads] + [torch.tensor(u, device=grads[0].device) for u in used])
        dist.all_reduce(flat, group=self._group)
        mean, used_by = flat[: len(grads)] / self._group.size(), flat[len(grads) :]
        for parameter, grad, value, ranks in zip(parameters, grads, mean, used_by, strict=True):
            if ranks > 0:
                parameter.grad = grad.copy_(value)
