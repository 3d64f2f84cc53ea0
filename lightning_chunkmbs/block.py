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

import contextvars
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .arguments import CutCall, CutRule, Template, cut_call, drop_cache, fill, holds_cache, join_outputs
from .block_buffers import BlockBuffers
from .offload import ActivationStore
from .recorders import Recorded, put_back, taking_off
from .report import Notices, StepCounter
from .stored_activation import version
from .trees import tree_leaves

_SETTINGS = "_chunkmbs_settings"


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
    forward = patched or functools.partial(type(module).forward, module)
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
        settings.counter.add("chunks", sum(cut.chunks for cut in cuts))

    def body(tensors: list[Tensor]) -> list[list[tuple[Any, Recorded]]]:
        pieces = iter(tensors)
        for cut in cuts:
            cut.replace(pieces)
        return _run_chunks(settings, calls, cuts)

    chunks = settings.gather(block, body, [tensor for cut in cuts for tensor in cut.tensors])
    outputs = []
    for call, cut, results in zip(calls, cuts, chunks, strict=True):
        output, recorded = hand_out(_join(settings, cut, results))
        if recorded:
            call.run(functools.partial(put_back, recorded))
        outputs.append(output)
    return outputs


def _join(settings: BlockSettings, cut: CutCall, results: list[tuple[Any, Recorded]]) -> tuple[Any, Recorded]:
    """Join what the chunks of one micro-batch returned, and what was recorded inside them."""
    dim = settings.rule.batch_dim if settings.rule else 0
    output = join_outputs(settings.name, [output for output, _ in results], cut.sizes, dim)
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

    def body(tensors: list[Tensor]) -> list[Tensor]:
        # An empty part of each parameter: no value is read, and the gradient is zeros.
        return [sum((p.flatten()[:0].sum().float() for p in block.parameters()), tensors[0])]

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
    return cut_call(settings.name, rule, settings.names, args, kwargs, settings.notices)


def _run_chunks(
    settings: BlockSettings, calls: Sequence[BlockCall], cuts: list[CutCall]
) -> list[list[tuple[Any, Recorded]]]:
    """Run all chunks, last to first (see [Note: reverse order]), and return their results first to last."""
    results: list[list[Any]] = [[None] * cut.chunks for cut in cuts]
    for call, cut, out in reversed(list(zip(calls, cuts, results, strict=True))):
        for i in reversed(range(cut.chunks)):
            out[i] = call.run(functools.partial(taking_off, functools.partial(_run_chunk, settings, cut, i)))
    return results


def _run_chunk(settings: BlockSettings, cut: CutCall, i: int) -> Any:
    values = cut.chunk(i)
    run = _Run(settings, cut.template)
    if not torch.is_grad_enabled():
        return run(*values)
    # Casts cached by autocast would add up the chunks' gradients in the lower precision.
    torch.clear_autocast_cache()
    entry = None
    if cut.entry is not None:
        values[cut.entry] = entry = _dense(values[cut.entry])
    # Only positional tensors pass through the saved-tensor hooks, hence the flat calls.
    if entry is None or settings.store is None:
        return checkpoint(run, *values, use_reentrant=False)
    before = version(entry)
    with settings.store.hooks(entry, wait=settings.writes_entry):
        output = checkpoint(run, *values, use_reentrant=False)
    settings.writes_entry = version(entry) != before
    return output


def _dense(tensor: Tensor) -> Tensor:
    """Return ``tensor`` without gaps between its rows: the layout of a micro-batch of its own, and of a host copy.

    A slice along a later dimension has gaps. Recomputation from a copy without them would run other kernels, and
    ``checkpoint`` refuses what these save.
    """
    alike = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return tensor if alike else tensor.clone()


class _Run:
    """One chunk's forward, run again by recomputation in the state of its first run.

    Recomputation may come from another thread and after the step has ended. ``checkpoint`` brings back autocast and
    random numbers; contextvars and the default dtype are brought back here.
    """

    def __init__(self, settings: BlockSettings, template: Template) -> None:
        self.settings = settings
        self.template = template
        self.written: list[str] = []
        self.training = settings.buffers.block.training
        self.context: contextvars.Context | None = None
        self.dtype = torch.get_default_dtype()

    def __call__(self, *values: Tensor) -> Any:
        if self.context is None:
            self.context = contextvars.copy_context()
            marks = self.settings.buffers.marks()
            output = self._run(values)
            self.written = self.settings.buffers.written(marks)
            if self.written and torch.is_grad_enabled():
                _warn_written(self.settings, self.written)
            return output
        # What is recorded again is dropped: the model has used what it recorded in its first run.
        return self.context.copy().run(taking_off, functools.partial(self._rerun, values))[0]

    def _run(self, values: Sequence[Tensor]) -> Any:
        args, kwargs = fill(self.template, values)
        return self.settings.forward(*args, **kwargs)

    def _rerun(self, values: Sequence[Tensor]) -> Any:
        now = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        block = self.settings.buffers.block
        training = block.training
        try:
            if training != self.training:  # a step may toggle eval() and train() around its passes
                block.train(self.training)
            with self.settings.buffers.kept(self.written):
                return self._run(values)
        finally:
            torch.set_default_dtype(now)
            if training != self.training:
                block.train(training)


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
