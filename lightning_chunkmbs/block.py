"""ChunkedBlock: one gathered call of a block for many chunks.

[Note: one call for FSDP2]
FSDP2 gathers in a pre-forward hook and reduces when one autograd node over all inputs of that call has its gradients.
So a block's chunks are run by one function between FSDP2's two hooks: one gather for the forward pass, one for the
backward pass, one reduce-scatter after the last chunk, however many chunks there are.

[Note: hooks see the batch]
FSDP2's hooks are taken off the module (see ``sharding.py``) and called around that function. All other hooks of the
block stay where they are. They run in ``nn.Module.__call__`` around ``forward``, which for a chunked block stands for
one micro-batch: they see its arguments and its joined output, once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import CutCall, cut_call
from .caches import drop_cache, holds_cache
from .chunk_runs import BlockCall, BlockSettings, run_fitting
from .joining import OutputJoin
from .meshes import local_part
from .recorders import Recorded, put_back
from .ties import knots_for, tie
from .trees import leaves

_SETTINGS = "_chunkmbs_settings"


class ChunkedBlock:
    """Base of the classes that chunked blocks get in place of their own."""

    @property
    def gradient_checkpointing(self) -> bool:
        """False: Hugging Face layers checkpoint themselves when this is set, and would be recomputed twice."""
        return False

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, on: bool) -> None:
        if on:
            _warn_own_checkpointing(getattr(self, _SETTINGS))


def make_chunked(module: nn.Module, settings: BlockSettings) -> None:
    """Turn ``module`` into a chunked block in place: its class changes, names of parameters and modules stay."""
    # An instance's own forward (some libraries patch one in) would hide the class's.
    module.__dict__.pop("forward", None)
    setattr(module, _SETTINGS, settings)
    if module.__dict__.pop("gradient_checkpointing", False):
        _warn_own_checkpointing(settings)
    module.__class__ = _chunked_class(type(module))  # type: ignore[arg-type]


def own_forward(module: nn.Module) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Return the forward that ``module`` has now and the names of its positional parameters."""
    patched = module.__dict__.get("forward")
    forward = patched or partial(type(module).forward, module)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(forward).parameters.values()
    return forward, tuple(p.name for p in parameters if p.kind in kinds)


def block_settings(module: nn.Module) -> BlockSettings:
    """Return the settings of a chunked block."""
    settings: BlockSettings = getattr(module, _SETTINGS)
    return settings


@functools.cache  # one class per original class: torch.compile guards on it, and `is` comparisons keep working
def _chunked_class(cls: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        dispatch, call = block_settings(self).dispatch, BlockCall(args, kwargs)
        return run_block(self, [call])[0] if dispatch is None else dispatch(self, call)

    return type(f"Chunked{cls.__name__}", (ChunkedBlock, cls), {"forward": forward, "__module__": cls.__module__})


def run_block(
    block: nn.Module, calls: Sequence[BlockCall], hand_out: Callable[[Any], Any] = lambda joined: joined
) -> list[Any]:
    """Run a block once for several micro-batches and return their joined outputs.

    Args:
        block: a chunked block.
        calls: one call for each micro-batch; all of them with gradients or all without.
        hand_out: maps what a micro-batch is given (a tree of tensors), before it is given.
    """
    settings = block_settings(block)
    cuts = [_cut(settings, call) for call in calls]
    tensors = [tensor for cut in cuts for tensor in cut.tensors]
    joins: list[OutputJoin] = []

    def body(tensors: list[Tensor]) -> list[list[tuple[Any, Recorded]]]:
        pieces = iter(tensors)
        for cut in cuts:
            cut.replace(pieces)
        joins[:], results = run_fitting(settings, calls, cuts, partial(tie, list(pieces)))
        return results

    chunks = settings.gather(block, body, tensors + knots_for(block, tensors))
    if torch.is_grad_enabled():
        settings.counter.add("blocks")
        settings.counter.add("calls", len(calls))
        settings.counter.add("chunks", sum(map(len, chunks)))
    outputs = []
    for call, join, results in zip(calls, joins, chunks, strict=True):
        output, recorded = hand_out(_join(settings, join, results))
        if recorded:
            call.run(partial(put_back, recorded))
        outputs.append(output)
    return outputs


def _join(settings: BlockSettings, join: OutputJoin, results: list[tuple[Any, Recorded]]) -> tuple[Any, Recorded]:
    """Join what the chunks of one micro-batch returned, and what was recorded inside them."""
    output = join.join([output for output, _ in results])
    if torch.is_grad_enabled() and not any(isinstance(leaf, Tensor) for leaf in leaves(output)):
        raise TypeError(
            f"{settings.name}: a block returns what it computes, and this one returned no tensor. What it writes into "
            f"an argument or attribute is lost when it is recomputed; return it, or take the block out of the plans."
        )
    recorded = [recorded for _, recorded in results]
    # What is recorded has the samples first, be it one row for each ([batch, ...]) or many ([tokens, experts]).
    joined = {key: [torch.cat(parts) for parts in zip(*(r[key] for r in recorded), strict=True)] for key in recorded[0]}
    return output, joined


def run_idle_block(block: nn.Module) -> Tensor:
    """Take part in a block call of other ranks without a micro-batch of one's own.

    Returns:
        A zero (0-dim). With gradients, back-propagating it gives zero gradients to all parameters of the block, so that
        its reduce-scatter takes place as on the ranks that had work for it.
    """
    parameter = next(block.parameters())

    def body(tensors: list[Tensor]) -> list[Tensor]:
        # An empty part of each parameter (which tensor parallelism has split): no value is read, the gradient is zeros.
        return [sum((local_part(p).flatten()[:0].sum().float() for p in block.parameters()), tensors[0])]

    dummy = torch.zeros((), device=parameter.device, requires_grad=torch.is_grad_enabled())
    output: Tensor = block_settings(block).gather(block, body, [dummy], idle=True)[0]
    return output


def _cut(settings: BlockSettings, call: BlockCall) -> CutCall:
    args, kwargs, rule = call.args, call.kwargs, settings.rule
    if rule is not None:
        settings.received.update(kwargs.keys() & set(rule.kwarg_names))
    if torch.is_grad_enabled():
        args, kwargs = drop_cache(settings.name, settings.names, args, kwargs, settings.notices)
    elif holds_cache(settings.names, args, kwargs):
        rule = None  # a cache belongs to the whole batch
    return cut_call(settings.name, rule, settings.names, args, kwargs, settings.notices, settings.cuts.cut)


def _warn_own_checkpointing(settings: BlockSettings) -> None:
    settings.notices.warn(
        "gradient_checkpointing",
        f"{settings.name}: recompute_plan recomputes this block already, so the model's own gradient checkpointing is "
        f"left off for the blocks that the plan names. Delete gradient_checkpointing_enable() to silence this.",
    )
