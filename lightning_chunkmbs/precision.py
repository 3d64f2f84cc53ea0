"""Precision of the strategy: which precisions are supported, and clipping over sharded and whole parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

_SUPPORTED = ("32-true",)


class ChunkMBSPrecision(Precision):
    """Precision plugin of :class:`~lightning_chunkmbs.ChunkMBSStrategy`, which puts it in place itself."""

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip gradients to the norm over all parameters: those sharded on any mesh and those held whole."""
        clip_by_total_norm(self.main_params(optimizer), float(clip_val))


def precision_plugin_for(plugin: Precision | None) -> Precision | None:
    """Return the plugin to use where Lightning or a user set ``plugin``.

    Raises:
        ValueError: the precision is not supported.
        TypeError: ``plugin`` is a class of its own, whose behaviour would be lost.
    """
    if plugin is None or isinstance(plugin, ChunkMBSPrecision):
        return plugin
    if plugin.precision not in _SUPPORTED:
        raise ValueError(
            f"ChunkMBSStrategy supports precision={' or '.join(map(repr, _SUPPORTED))} in this version, and the "
            f"Trainer was given {plugin.precision!r}. Write Trainer(precision='32-true')."
        )
    if type(plugin) is not Precision:
        raise TypeError(
            f"ChunkMBSStrategy brings its own precision plugin, and the Trainer was given {type(plugin).__name__}. "
            f"Delete it from Trainer(plugins=...)."
        )
    return ChunkMBSPrecision()


def clip_by_total_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients in place so that their 2-norm over all ``parameters`` is at most ``max_norm``.

    ``torch.nn.utils.clip_grad_norm_`` fails on a mix of meshes; here each mesh has its own total, and the totals are
    combined. Gradients held whole are equal on all ranks and count once.

    Returns:
        The 2-norm before clipping, 0-dim, the same on every rank.
    """
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = [get_total_norm([p.grad for p in group if p.grad is not None]) for group in by_mesh.values()]
    totals = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(totals)) if totals else torch.zeros(())
    for group in by_mesh.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total
