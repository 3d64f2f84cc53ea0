"""Gradients of a block with groups inside, which may be used by the chunks of some ranks only.

FSDP2 reduces parameters that have a gradient, and the ranks must reduce the same. What a nested group holds (experts)
and what leads to it (a router) may be used on one rank and not on another. So when the backward pass of such a block is
over, parameters without a gradient get zeros. The node that does so is the last before FSDP2's, behind all chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import Function

from .fsdp2 import fill_missing, gathered_params, nested_groups


def completed(block: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the ``tensors`` that enter a block's chunks, tied to a node that completes the block's gradients."""
    wanting = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    result = list(tensors)
    if wanting and nested_groups(block):
        for i, tensor in zip(wanting, _Complete.apply(block, *(tensors[i] for i in wanting)), strict=True):
            result[i] = tensor
    return result


class _Complete(Function):
    @staticmethod
    def forward(block: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.block = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        for param in gathered_params(ctx.block):
            if param.sharded_param.requires_grad:
                fill_missing(param)
        return (None, *grads)
