"""Dtypes of shards, gathered parameters, gradients and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from .trees import map_tree


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """Dtypes of a sharded model; None leaves things as they are.

    Args:
        shards: dtype of parameters and buffers, to which the whole model is converted.
        param: dtype in which parameters are gathered and computed with.
        reduce: dtype in which gradients are reduced.
        output: dtype of the outputs of blocks and further groups.
        cast_inputs: cast floating inputs of blocks and further groups, and batches, to the dtype of computation.
    """

    shards: torch.dtype | None = None
    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    cast_inputs: bool = False

    def policy(self, *, casts: bool) -> MixedPrecisionPolicy:
        """Return FSDP2's policy for a group.

        Args:
            casts: FSDP2 casts inputs and outputs. Blocks cast those of each chunk themselves, and the root's outputs
                are what steps return.
        """
        return MixedPrecisionPolicy(
            # FSDP2 casts inputs to `param_dtype` only, so it is named for converted shards too.
            param_dtype=self.computed,
            reduce_dtype=self.reduce,
            output_dtype=self.output if casts else None,
            cast_forward_inputs=self.cast_inputs and casts,
        )

    def cast_call(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return a chunk's tensors, floating ones in the dtype of computation if they are to be cast."""
        dtype = self.computed if self.cast_inputs else None
        return [v if dtype is None or not v.is_floating_point() else v.to(dtype) for v in values]

    def cast_output(self, output: Any) -> Any:
        """Return a chunk's output, floating tensors in the dtype of outputs if there is one."""
        if self.output is None:
            return output
        return map_tree(
            lambda v, _: v.to(self.output) if isinstance(v, Tensor) and v.is_floating_point() else v, output
        )

    @property
    def computed(self) -> torch.dtype | None:
        """Dtype in which parameters are computed with; None: each in its own."""
        return self.param or self.shards


def accumulate_in_fp32(parameter: Tensor) -> None:
    """Let autograd add up gradients of ``parameter`` in fp32, if it computes in less.

    In one backward pass the gradients of all chunks are added before the parameter gets them; autograd casts each to
    the parameter's ``grad_dtype`` first. A gradient that exists is kept.
    """
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    if parameter.requires_grad and dtype != parameter.dtype:
        set_gradient_dtype(parameter, dtype)


def set_gradient_dtype(parameter: Tensor, dtype: torch.dtype) -> None:
    """Set the dtype of a parameter's gradient, be there one or not."""
    if not hasattr(parameter, "grad_dtype"):
        raise RuntimeError(
            f"Parameters of {parameter.dtype} need torch.Tensor.grad_dtype for gradients in fp32, and torch "
            f"{torch.__version__} has none. Install torch 2.11 or newer, or write Trainer(precision='32-true')."
        )
    if parameter.grad_dtype == dtype:
        return
    # torch refuses to change it while a gradient exists.
    grad, parameter.grad = parameter.grad, None
    parameter.grad_dtype = dtype
    if grad is not None:
        parameter.grad = grad.to(dtype)
