"""Ties: when FSDP2 learns that the backward pass of a block without gradient inputs is over.

FSDP2 knows that a block's backward is over when the gradients of its inputs are there. Where no input needs one (token
ids, the output of a frozen embedding), it would learn of it at the end of the whole backward pass, and keep parameters
and gradients until then. So the outputs of the chunks are tied to an empty tensor, the knot, that passes through the
block's gather as an input. Its node was made before those of the chunks, so autograd runs it when they are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from .trees import map_tree


def knots_for(block: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a knot if gradients are wanted and none of a block's input ``tensors`` needs one, else nothing."""
    if not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in tensors):
        return []
    device = next((t.device for t in (*block.parameters(), *tensors)), torch.device("cpu"))
    return [torch.empty(0, device=device, requires_grad=True)]


def tie(knots: Sequence[Tensor], output: Any) -> Any:
    """Return a chunk's output tied to ``knots``, none or one."""

    def tied(leaf: Any, _path: str) -> Any:
        return _Tie.apply(leaf, *knots) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf

    return map_tree(tied, output) if knots else output


class _Tie(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, knot: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], torch.empty(0, device=grads[0].device)
