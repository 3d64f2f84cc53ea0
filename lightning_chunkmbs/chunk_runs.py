"""The chunks of a block call: their order, their contexts, and what a block needs to run them.

[Note: reverse order]
The chunks run last to first. Autograd runs the nodes made last first, so backward visits the chunks first to last and
gradients add up in the order of sequential accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import CutCall, CutRule, Template, cut_call, fill
from .block_buffers import BlockBuffers
from .chunked_tensor import Cuts
from .dtypes import Dtypes
from .host_functions import load
from .host_tensor import HostTensor, Put
from .joining import OutputJoin
from .offload import ActivationStore, dense
from .out_of_memory import Chunks, Fitting, smaller_chunks
from .profiling import chunk_range
from .recompute import NOTHING, Contexts, Run
from .recorders import Recorded, taking_off
from .report import NoNotices, Notices, StepCounter
from .selective import SaveOps
from .stored_activation import StoredActivation, version
from .trees import map_tree

Named = Callable[..., AbstractContextManager[Any]]  # called with whether a chunk is run again


def _run_here(fn: Callable[[], Any]) -> Any:
    return fn()


def _no_gather(_module: nn.Module, body: Callable[[list[Tensor]], Any], tensors: list[Tensor], **_: bool) -> Any:
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
        dispatch: runs a micro-batch's call of the block; in lockstep it waits for the other micro-batches;
            None: it runs at once.
        received: declared keywords that some call of this block was given.
        writes_entry: whether the last chunk wrote its input in place, before which the copy to the host must have
            ended; the first chunk is taken to do so.
        buffers: the block's buffers.
        cuts: remembers of which chunks the model's batches are made; shared by its blocks.
        dtypes: to what the tensors and outputs of chunks are cast.
        save_ops: operators whose results are kept and not computed again.
        stream: moves outputs of chunks to the host until they are needed; None leaves them on the device.
        may_halve: whether a chunk that does not fit in memory may be cut in two; not where ranks share its layers.
        last: whether the block runs last. The chunk that it runs last is needed first in backward and does not travel.
    """

    name: str
    forward: Callable[..., Any]
    names: tuple[str, ...]
    rule: CutRule | None
    store: ActivationStore | None
    counter: StepCounter
    notices: Notices
    gather: Callable[..., Any] = _no_gather
    dispatch: Callable[[nn.Module, BlockCall], Any] | None = None
    received: set[str] = field(default_factory=set)
    writes_entry: bool = True
    buffers: BlockBuffers = field(default_factory=lambda: BlockBuffers(nn.Module()))
    cuts: Cuts = field(default_factory=Cuts)
    dtypes: Dtypes = field(default_factory=Dtypes)
    stream: Put | None = None
    may_halve: bool = True
    last: bool = False
    save_ops: SaveOps | None = None


_Results = list[list[tuple[Any, Recorded]]]


def run_fitting(
    settings: BlockSettings, calls: Sequence[BlockCall], cuts: list[CutCall], tied: Callable[[Any], Any]
) -> tuple[list[OutputJoin], _Results]:
    """Run all chunks, smaller ones if memory does not suffice; return what joins their results, and these."""

    def cut_again(rule: CutRule, call: Template) -> CutCall:
        # Of a chunk's call nothing is to be said: a table may well have the size of a chunk.
        return cut_call(settings.name, rule, settings.names, *call, NoNotices(), settings.cuts.cut)

    def run(chunks: list[Chunks]) -> tuple[list[OutputJoin], _Results]:
        joins = [OutputJoin(settings.name, c.sizes, c.dim, settings.cuts, settings.stream) for c in chunks]
        with settings.buffers.undone_if_failed() if may_retry else nullcontext():
            return joins, _run_chunks(settings, calls, chunks, joins, tied)

    may_retry = settings.rule is not None and settings.may_halve
    fitting = Fitting(settings.name, settings.rule, cut_again, may_halve=settings.may_halve)
    result = fitting.run([Chunks.of(cut) for cut in cuts], run)
    if fitting.rule is not None and fitting.rule is not settings.rule:
        settings.rule = fitting.rule
        settings.notices.warn_here("out of memory", smaller_chunks(settings.name, fitting.rule))
    return result


def _run_chunks(
    settings: BlockSettings,
    calls: Sequence[BlockCall],
    chunks: list[Chunks],
    joins: list[OutputJoin],
    tied: Callable[[Any], Any],
) -> _Results:
    """Run all chunks, last to first (see [Note: reverse order]), and return their results first to last."""
    results: list[list[Any]] = [[None] * len(c.parts) for c in chunks]
    n = left = sum(len(c.parts) for c in chunks)
    for k, (call, join) in reversed(list(enumerate(zip(calls, joins, strict=True)))):
        alone = len(chunks[k].parts) == 1
        for i, (cut, part) in reversed(list(enumerate(chunks[k].parts))):
            kept, left = settings.last and k == i == 0, left - 1
            named = partial(chunk_range, settings.name, left, n)
            run = partial(_run_chunk, settings, cut, part, named, keep=kept, alone=alone)
            output, recorded = call.run(partial(taking_off, run))
            results[k][i] = join.place(i, tied(output)), recorded
    return results


def _run_chunk(settings: BlockSettings, cut: CutCall, i: int, named: Named, *, keep: bool, alone: bool) -> Any:
    values = cut.chunk(i)
    run = Run(partial(_forward, settings, cut.template, i, named), settings.buffers, partial(_warn_written, settings))
    if not torch.is_grad_enabled():
        return run(*values)
    if cut.entry is None:
        return run.recomputed(values, _contexts(settings))
    entry = values[cut.entry]
    contexts = _contexts(settings, entry)
    if not isinstance(entry, HostTensor):
        # A slice along a later dimension has gaps between its rows. Recomputation from a copy without them would run
        # other kernels, and `checkpoint` refuses what these save.
        entry = values[cut.entry] = dense(entry)
    before = version(entry)
    store = settings.store
    with nullcontext() if store is None else store.hooks(entry, wait=settings.writes_entry, keep=keep):
        output = run.recomputed(values, contexts)
    settings.writes_entry = version(entry) != before
    if settings.writes_entry and not alone:
        raise RuntimeError(
            f"A block that is cut gets parts of its batch, and {settings.name} modifies its input by an inplace "
            f"operation. Write x = x + y in place of x += y where the block's input is changed."
        )
    return output


def _contexts(settings: BlockSettings, entry: Tensor | None = None) -> Contexts:
    """What a chunk's first run and its recomputation, which begins at ``entry``, run under."""
    save, store = settings.save_ops, settings.store
    if save is None:
        return NOTHING
    if store is None:
        return partial(save.contexts, settings.name, lambda tensor: tensor, lambda tensor: tensor)
    # An entry that waits on the host was put there long before; any other is the last that is put before they are.
    parts = entry.parts if isinstance(entry, HostTensor) else []
    first = next((part for part in parts if isinstance(part, StoredActivation)), True)
    return partial(save.contexts, settings.name, partial(store.put, beside=first), store.take)


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


def _warn_written(settings: BlockSettings, names: list[str]) -> None:
    settings.notices.warn(
        "buffers",
        f"{settings.name} writes its buffers {', '.join(names)} while it runs: once for each chunk, where a whole "
        f"batch would write once (batch statistics are then those of a chunk). Recomputation leaves them alone.",
    )
