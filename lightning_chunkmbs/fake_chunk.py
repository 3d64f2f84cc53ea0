"""What one chunk of a block needs, measured on fake tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .arguments import CutCall, fill
from .block import own_forward
from .dtypes import Dtypes
from .fake_save_ops import FakeSaveOps
from .storages import StorageCounter
from .trees import leaves

__all__: list[str] = []


@dataclass(frozen=True, kw_only=True)
class ChunkCost:
    """Bytes of one chunk of a block, beside parameters, their gradients and what comes in.

    Attributes:
        forward: most that is alive in forward, what it returns and ``kept`` included.
        backward: most that is alive in recomputation and backward beside ``kept``, gradients of single parameters
            before they are added to the others included.
        flops: of the forward pass.
        entry: its part of the entry activation.
        exit: what it returns.
        kept: results that are kept and not computed again.
    """

    forward: int
    backward: int
    flops: int
    entry: int = 0
    exit: int = 0
    kept: tuple[int, ...] = ()


def measure_chunk(
    block: nn.Module, cut: CutCall, counter: StorageCounter, dtypes: Dtypes, save: FakeSaveOps
) -> ChunkCost:
    """Run one chunk twice: in the second run gradients of parameters exist, as for all chunks but the first."""
    forward, _ = own_forward(block)
    i = max(range(cut.chunks), key=lambda i: cut.sizes[i] if cut.sizes else 0)
    values = [v if isinstance(v, nn.Parameter) else _alone(v) for v in cut.chunk(i)]

    def run(*tensors: Tensor) -> Any:
        args, kwargs = fill(cut.template, dtypes.cast_call(tensors), i)
        return dtypes.cast_output(forward(*args, **kwargs))

    cost = ChunkCost(forward=0, backward=0, flops=0)
    for _ in range(2):
        start, flops = counter.mark(), counter.flops
        kept: list[int] = []
        contexts = partial(save.contexts, kept)
        output = checkpoint(run, *values, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        in_forward, flops = counter.peak - start, counter.flops - flops
        roots = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        del output
        with counter.paused():
            gradients = [torch.empty_like(root) for root in roots]
        if roots:
            start = counter.mark()
            torch.autograd.backward(roots, gradients)
        cost = ChunkCost(
            forward=in_forward,
            backward=counter.peak - start if roots else 0,
            flops=flops,
            entry=0 if cut.entry is None else values[cut.entry].nbytes,
            exit=sum(root.nbytes for root in roots),
            kept=tuple(kept),
        )
        del roots, gradients
        for value in values:
            value.grad = None
    for parameter in block.parameters():
        parameter.grad = None
    return cost


def _alone(value: Tensor) -> Tensor:
    """A chunk's tensor in memory of its own."""
    return torch.empty(value.shape, dtype=value.dtype, requires_grad=value.requires_grad)
