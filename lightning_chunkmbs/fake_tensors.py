"""A module on fake tensors, which have shapes and no memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .dtypes import Dtypes, accumulate_in_fp32

__all__: list[str] = []


def make_fake(module: nn.Module, dtypes: Dtypes) -> None:
    """Replace parameters and buffers by fake tensors on the CPU; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    for inner in module.modules():
        slots: list[dict[str, Any]] = [inner._parameters, inner._buffers]
        for named in slots:
            for name, tensor in named.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = _fake(tensor, dtypes)
                    named[name] = made[id(tensor)]


def _fake(tensor: Tensor, dtypes: Dtypes) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    dtype = dtypes.computed if tensor.is_floating_point() and dtypes.computed else tensor.dtype
    parameter = nn.Parameter(torch.empty(tensor.shape, dtype=dtype, device="cpu"), tensor.requires_grad)
    accumulate_in_fp32(parameter)
    return parameter
