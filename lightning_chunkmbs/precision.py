"""Precision of the strategy: dtypes for each of the Trainer's precisions, and clipping over all parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from .dtypes import Dtypes
from .meshes import local_part
from .plans import FSDPPlan
from .trees import map_tree

_DTYPES = {
    "32-true": Dtypes(),
    "bf16-mixed": Dtypes(param=torch.bfloat16, reduce=torch.float32),
    "bf16-true": Dtypes(shards=torch.bfloat16, reduce=torch.float32),
}


class ChunkMBSPrecision(Precision):
    """Precision plugin of :class:`~lightning_chunkmbs.ChunkMBSStrategy`, which puts it in place itself.

    Args:
        precision: ``"32-true"``; ``"bf16-mixed"``: shards and optimizer state in float32, parameters gathered in
            bfloat16, steps under autocast; ``"bf16-true"``: everything in bfloat16. Gradients are added up and reduced
            in float32.
        device_type: device for autocast; None: the accelerator, or the CPU where there is none.

    Attributes:
        input_dtype: dtype to which floating tensors of batches are cast; None leaves them alone.

    Raises:
        ValueError: another precision.
    """

    precision: Literal["32-true", "bf16-mixed", "bf16-true"]

    def __init__(self, precision: str = "32-true", device_type: str | None = None) -> None:
        if precision not in _DTYPES:
            raise ValueError(_unsupported(precision))
        self.precision = precision  # type: ignore[assignment]
        accelerator = torch.accelerator.current_accelerator()
        self.device_type = device_type or (accelerator.type if accelerator else "cpu")
        self.input_dtype: torch.dtype | None = None

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Autocast for ``bf16-mixed``; the default dtype of new tensors for ``bf16-true``."""
        if self.precision == "bf16-mixed":
            # Casts kept in the cache would add up the gradients of several uses in bfloat16.
            with torch.autocast(self.device_type, torch.bfloat16, cache_enabled=False):
                yield
        else:
            with self.tensor_init_context():
                yield

    @contextmanager
    def tensor_init_context(self) -> Iterator[None]:
        """The default dtype in which shards are."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(_DTYPES[self.precision].shards or before)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def module_init_context(self) -> Any:
        """The default dtype in which shards are."""
        return self.tensor_init_context()

    def convert_input(self, data: Any) -> Any:
        """Cast floating tensors of a batch where ``cast_forward_inputs`` is set; targets and tables are among them."""
        dtype = self.input_dtype
        if dtype is None:
            return data
        return map_tree(lambda x, _: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, data)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float, error_if_nonfinite: bool = False) -> None:
        """Clip gradients to the norm over all parameters: those sharded on any mesh and those held whole."""
        clip_by_total_norm(self.main_params(optimizer), float(clip_val), error_if_nonfinite=error_if_nonfinite)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip each number of each gradient to ``[-clip_val, clip_val]``."""
        with torch.no_grad():
            for parameter in self.main_params(optimizer):
                if parameter.grad is not None:
                    local_part(parameter.grad).clamp_(-clip_val, clip_val)


def dtypes_for(plugin: Precision, plan: FSDPPlan) -> Dtypes:
    """Return the dtypes of a model under the Trainer's precision, where the plan does not name others."""
    dtypes = _DTYPES[str(plugin.precision)]
    if plan.param_dtype is not None:
        dtypes = replace(dtypes, param=_dtype(plan.param_dtype), reduce=torch.float32)
    return replace(
        dtypes,
        reduce=_dtype(plan.reduce_dtype) or dtypes.reduce,
        output=_dtype(plan.output_dtype),
        cast_inputs=plan.cast_forward_inputs,
    )


def set_input_dtype(plugin: Precision, dtypes: Dtypes) -> None:
    """Let ``plugin`` cast batches where ``cast_forward_inputs`` is set: they are the inputs of the root's group."""
    if isinstance(plugin, ChunkMBSPrecision):
        plugin.input_dtype = dtypes.computed if dtypes.cast_inputs else None


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def precision_plugin_for(plugin: Precision | None) -> Precision | None:
    """Return the plugin to use where Lightning or a user set ``plugin``.

    Raises:
        ValueError: the precision is not supported.
        TypeError: ``plugin`` is a class of its own, whose behaviour would be lost.
    """
    if plugin is None or isinstance(plugin, ChunkMBSPrecision):
        return plugin
    if plugin.precision not in _DTYPES:
        raise ValueError(_unsupported(plugin.precision))
    if type(plugin) not in (Precision, MixedPrecision, HalfPrecision):
        raise TypeError(
            f"ChunkMBSStrategy brings its own precision plugin, and the Trainer was given {type(plugin).__name__}. "
            f"Delete it from Trainer(plugins=...)."
        )
    # Lightning says "cuda" for every accelerator.
    on_cpu = getattr(plugin, "device", None) == "cpu"
    return ChunkMBSPrecision(plugin.precision, "cpu" if on_cpu else None)


def _unsupported(precision: object) -> str:
    return (
        f"ChunkMBSStrategy supports precision={' or '.join(map(repr, _DTYPES))}, and the Trainer was given "
        f"{precision!r}. Write Trainer(precision='bf16-mixed') or Trainer(precision='32-true')."
    )


def total_norm(parameters: Iterable[Tensor], *, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
    """Return the norm over the gradients of all ``parameters``: those sharded on any mesh and those held whole.

    ``torch.nn.utils.clip_grad_norm_`` fails on a mix of meshes; here each mesh has its own total, and the totals are
    combined. Gradients held whole are equal on all ranks and count once. All ranks must call this.

    Returns:
        The norm, 0-dim, the same on every rank; 0 without gradients.

    Raises:
        RuntimeError: the norm is infinite or NaN and ``error_if_nonfinite`` is set.
    """
    norms = [_norm([p.grad for p in group if p.grad is not None], norm_type) for group in _by_mesh(parameters)]
    totals = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    if not totals:
        return torch.zeros(())
    together = torch.stack([total.to(totals[0].device) for total in totals])
    total = torch.linalg.vector_norm(together, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The {norm_type}-norm of the gradients is {total.item()}, so they cannot be clipped. Look for a loss that "
            f"is infinite or NaN, or leave error_if_nonfinite out to go on."
        )
    return total


def _norm(grads: list[Tensor], norm_type: float) -> Tensor:
    if not any(grad.dtype.itemsize < 4 for grad in grads):
        return get_total_norm(grads, norm_type)
    # In the gradients' own dtype a norm over many of them would have few right digits.
    norms = [torch.linalg.vector_norm(grad, norm_type, dtype=torch.float32) for grad in grads]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def clip_by_total_norm(
    parameters: Iterable[Tensor], max_norm: float, *, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients in place so that their norm over all ``parameters`` is at most ``max_norm``.

    Returns:
        The norm before clipping, as :func:`total_norm` does, whose errors are raised before anything is scaled.
    """
    parameters = list(parameters)
    total = total_norm(parameters, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite)
    for group in _by_mesh(parameters):
        clip_grads_with_norm_(group, max_norm, total)
    return total


def _by_mesh(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the parameters that have a gradient, those on one mesh together."""
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    return list(by_mesh.values())
