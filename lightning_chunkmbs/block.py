"""ChunkedBlock: one gathered call of a block for many chunks.

[Note: one call for FSDP2]
FSDP2 gathers in a pre-forward hook and reduces when one autograd node over all inputs of that call has its gradients.
So a block's chunks are run by one function between FSDP2's two hooks: one gather for the forward pass, one for the
backward pass, one reduce-scatter after the last chunk, however many chunks there are.

[Note: hooks see the batch]
FSDP2's hooks are taken off the module (see ``sharding.py``) and called around that function. All other hooks of the
block stay where they are. They run in ``nn.Module.__call__`` around ``forward``, which for a chunked block stands for
one micro-batch: they see its arguments and its joined output, once.

[Note: reverse order]
The chunks run last to first. Autograd runs the nodes made last first, so backward visits the chunks first to last and
gradients add up in the order of sequential accumulation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .arguments import CutCall, CutRule, Template, cut_call, fill
from .block_buffers import BlockBuffers
from .caches import drop_cache, holds_cache
from .chunked_tensor import Cuts
from .dtypes import Dtypes
from .host_functions import load
from .host_tensor import HostTensor, Put
from .joining import OutputJoin
from .offload import ActivationStore
from .profiling import chunk_range
from .recompute import NOTHING, Contexts, Run
from .recorders import Recorded, put_back, taking_off
from .report import Notices, StepCounter
from .selective import SaveOps
from .stored_activation import version
from .ties import knots_for, tie
from .trees import map_tree, tree_leaves

_SETTINGS = "_chunkmbs_settings"

Named = Callable[..., AbstractContextManager[Any]]  # called with whether a chunk is run again


def _run_here(fn: Callable[[], Any]) -> Any:
    return fn()


def _no_gather(_module: nn.Module, body: Callable[[list[Tensor]], Any], tensors: list[Tensor]) -> Any:
    return body(tensors)


@dataclass
class BlockCall:
    """One micro-batch's call of a block.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
        run: runs a function in the state (contextvars, grad mode, autocast) of the step that made the call.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    run: Callable[[Callable[[], Any]], Any] = _run_here


@dataclass(kw_only=True)
class BlockSettings:
    """What a chunked block needs to run.

    Attributes:
        name: name of the block in its LightningModule, for messages.
        forward: the block's own forward, called with one chunk.
        names: names of that forward's positional parameters.
        rule: how calls are cut; None runs one chunk per micro-batch.
        store: where entry activations wait for backward; None keeps them on the device.
        counter: counts block calls and chunks.
        notices: where warnings go.
        gather: runs a function over the chunks' tensors with the block's parameters gathered.
        dispatch: runs a micro-batch's call of the block; in lockstep it waits for the other micro-batches.
        received: declared keywords that some call of this block was given.
        writes_entry: whether the last chunk wrote its input in place, before which the copy to the host must have
            ended; the first chunk is taken to do so.
        buffers: the block's buffers.
        cuts: remembers of which chunks the model's batches are made; shared by its blocks.
        dtypes: to what the tensors and outputs of chunks are cast.
        save_ops: operators whose results are kept and not computed again.
        stream: moves outputs of chunks to the host until they are needed; None leaves them on the device.
        last: whether the block runs last. The chunk that it runs last is needed first in backward and does not travel.
    """

    name: str
    forward: Callable[..., Any]
    names: tuple[str, ...]
    rule: CutRule | None
    store: ActivationStore | None
    counter: StepCounter
    notices: Notices
    gather: Callable[[nn.Module, Callable[[list[Tensor]], Any], list[Tensor]], Any] = _no_gather
    dispatch: Callable[[nn.Module, BlockCall], Any] = lambda block, call: run_block(block, [call])[0]
    received: set[str] = field(default_factory=set)
    writes_entry: bool = True
    buffers: BlockBuffers = field(default_factory=lambda: BlockBuffers(nn.Module()))
    cuts: Cuts = field(default_factory=Cuts)
    dtypes: Dtypes = field(default_factory=Dtypes)
    stream: Put | None = None
    last: bool = False
    save_ops: SaveOps | None = None


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
        return block_settings(self).dispatch(self, BlockCall(args, kwargs))

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
    if torch.is_grad_enabled():
        settings.counter.add("blocks")
        settings.counter.add("calls", len(calls))
        settings.counter.add("chunks", sum(cut.chunks for cut in cuts))

    joins = [OutputJoin(settings.name, cut.sizes, cut.dim, settings.cuts, settings.stream) for cut in cuts]
    tensors = [tensor for cut in cuts for tensor in cut.tensors]

    def body(tensors: list[Tensor]) -> list[list[tuple[Any, Recorded]]]:
        pieces = iter(tensors)
        for cut in cuts:
            cut.replace(pieces)
        return _run_chunks(settings, calls, cuts, joins, partial(tie, list(pieces)))

    chunks = settings.gather(block, body, tensors + knots_for(block, tensors))
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
    if torch.is_grad_enabled() and not any(isinstance(leaf, Tensor) for _, leaf in tree_leaves(output)):
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

    def local(p: Tensor) -> Tensor:
        return p.to_local() if isinstance(p, DTensor) else p  # of tensor parallelism

    def body(tensors: list[Tensor]) -> list[Tensor]:
        # An empty part of each parameter: no value is read, and the gradient is zeros.
        return [sum((local(p).flatten()[:0].sum().float() for p in block.parameters()), tensors[0])]

    dummy = torch.zeros((), device=parameter.device, requires_grad=torch.is_grad_enabled())
    output: Tensor = block_settings(block).gather(block, body, [dummy])[0]
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


def _run_chunks(
    settings: BlockSettings,
    calls: Sequence[BlockCall],
    cuts: list[CutCall],
    joins: list[OutputJoin],
    tied: Callable[[Any], Any],
) -> list[list[tuple[Any, Recorded]]]:
    """Run all chunks, last to first (see [Note: reverse order]), and return their results first to last."""
    results: list[list[Any]] = [[None] * cut.chunks for cut in cuts]
    n = left = sum(cut.chunks for cut in cuts)
    for k, (call, cut, join) in reversed(list(enumerate(zip(calls, cuts, joins, strict=True)))):
        for i in reversed(range(cut.chunks)):
            kept, left = settings.last and k == i == 0, left - 1
            named = partial(chunk_range, settings.name, left, n)
            output, recorded = call.run(partial(taking_off, partial(_run_chunk, settings, cut, i, named, keep=kept)))
            results[k][i] = join.place(i, tied(output)), recorded
    return results


def _run_chunk(settings: BlockSettings, cut: CutCall, i: int, named: Named, *, keep: bool) -> Any:
    values = cut.chunk(i)
    run = Run(partial(_forward, settings, cut.template, i, named), settings.buffers, partial(_warn_written, settings))
    if not torch.is_grad_enabled():
        return run(*values)
    contexts = _contexts(settings)
    if cut.entry is None:
        return run.recomputed(values, contexts)
    entry = values[cut.entry] = _dense(values[cut.entry])
    before = version(entry)
    store = settings.store
    with nullcontext() if store is None else store.hooks(entry, wait=settings.writes_entry, keep=keep):
        output = run.recomputed(values, contexts)
    settings.writes_entry = version(entry) != before
    if settings.writes_entry and cut.chunks > 1:
        raise RuntimeError(
            f"A block that is cut gets parts of its batch, and {settings.name} modifies its input by an inplace "
            f"operation. Write x = x + y in place of x += y where the block's input is changed."
        )
    return output


def _contexts(settings: BlockSettings) -> Contexts:
    """What a chunk's first run and its recomputation run under."""
    save, store = settings.save_ops, settings.store
    if save is None:
        return NOTHING
    if store is None:
        return partial(save.contexts, settings.name, lambda tensor: tensor, lambda tensor: tensor)
    return partial(save.contexts, settings.name, partial(store.put, beside=True), store.take)


def _forward(
    settings: BlockSettings, template: Template, i: int, named: Named, values: Sequence[Tensor], again: bool
) -> Any:
    with named(again=again):
        # What waits on the host comes here and not before, so that recomputation needs nothing of it on the device.
        values = settings.dtypes.cast_call([load(value, forward=not again) for value in values])
        args, kwargs = fill(template, values, i)
        output = settings.dtypes.cast_output(settings.forward(*args, **kwargs))
    if settings.save_ops is None or again:
        return output
    save = settings.save_ops
    return map_tree(lambda leaf, _: save.apart(leaf) if isinstance(leaf, Tensor) else leaf, output)


def _dense(tensor: Tensor) -> Tensor:
    """Return ``tensor`` without gaps between its rows: the layout of a micro-batch of its own, and of a host copy.

    A slice along a later dimension has gaps. Recomputation from a copy without them would run other kernels, and
    ``checkpoint`` refuses what these save.
    """
    if isinstance(tensor, HostTensor):
        return tensor
    alike = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return tensor if alike else tensor.clone()


def _warn_written(settings: BlockSettings, names: list[str]) -> None:
    settings.notices.warn(
        "buffers",
        f"{settings.name} writes its buffers {', '.join(names)} while it runs: once for each chunk, where a whole "
        f"batch would write once (batch statistics are then those of a chunk). Recomputation leaves them alone.",
    )


def _warn_own_checkpointing(settings: BlockSettings) -> None:
    settings.notices.warn(
        "gradient_checkpointing",
        f"{settings.name}: recompute_plan recomputes this block already, so the model's own gradient checkpointing is "
        f"left off for the blocks that the plan names. Delete gradient_checkpointing_enable() to silence this.",
    )
