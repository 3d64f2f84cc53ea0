"""What a step needs, measured on fake tensors: of one chunk of each kind of block, and of the code outside blocks.

[Note: how it is measured]
The step runs once for one micro-batch with stand-ins for the blocks, which return tensors of the right shapes: what is
alive then, and at most, is what the code outside blocks needs. Then one chunk of each kind of block is run forward,
recomputed and back-propagated by itself. Fake tensors choose the kernels of the CPU, where attention keeps no scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from .arguments import CutCall, CutRule, cut_call, fill
from .block import own_forward
from .caches import drop_cache
from .dtypes import Dtypes
from .fake_tensors import make_fake
from .recorders import Recorded, put_back, taking_off
from .report import Notices
from .storages import StorageCounter
from .trees import map_tree, tree_leaves

__all__: list[str] = []


@dataclass(frozen=True, kw_only=True)
class OutsideCost:
    """Bytes of one micro-batch's step outside blocks.

    Attributes:
        held: alive while blocks run, beside hidden states: masks, rotary tables, what the embedding saves.
        forward: most that is alive beside that until the loss is there.
        backward: most that is alive beside ``held`` until the loss is back-propagated to what the last block returned.
        gradients: gradients of parameters outside blocks that this has made.
        front: most that is alive beside all gradients of parameters while what comes before blocks is back-propagated.
        flops: of the forward pass.
    """

    held: int
    forward: int
    backward: int
    gradients: int
    front: int
    flops: int


@dataclass(frozen=True, kw_only=True)
class ChunkCost:
    """Bytes of one chunk of a block, beside parameters, their gradients and what comes in.

    Attributes:
        forward: most that is alive in forward, what it returns included.
        backward: most that is alive in recomputation and backward, gradients of single parameters before they are
            added to the others included.
        flops: of the forward pass.
    """

    forward: int
    backward: int
    flops: int


@dataclass(eq=False)
class _Call:
    """A call of a block with one micro-batch, of which shapes are kept."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    entry: int  # bytes of the activation from which it is recomputed
    exit: int  # bytes of what it returned


@dataclass
class FakeStep:
    """A module on fake tensors, and the calls of blocks that one of its steps makes.

    Made by :func:`run_fake_step`.

    Attributes:
        outside: cost of a micro-batch outside blocks.
        calls: the calls of blocks, in order.
        batch_size: samples of a micro-batch, as the cut blocks see it.
    """

    blocks: Mapping[str, nn.Module]
    chunked: frozenset[str]
    rule: CutRule | None
    mode: FakeTensorMode
    context: Callable[[], AbstractContextManager[Any]]
    outside: OutsideCost = field(
        default_factory=lambda: OutsideCost(held=0, forward=0, backward=0, gradients=0, front=0, flops=0)
    )
    calls: list[_Call] = field(default_factory=list)
    batch_size: int = 1
    _costs: dict[Any, ChunkCost] = field(default_factory=dict)

    def rule_for(self, name: str, chunk_mbs: int | None) -> CutRule | None:
        """Return how a block is cut into chunks of ``chunk_mbs`` samples; None: not at all."""
        if self.rule is None or name not in self.chunked or chunk_mbs is None:
            return None
        return replace(self.rule, chunk_mbs=chunk_mbs)

    def chunk_cost(self, call: _Call, chunk_mbs: int) -> ChunkCost:
        """Measure one chunk of a call, once for each kind of block."""
        block = self.blocks[call.name]
        rule = self.rule_for(call.name, chunk_mbs)
        key = (rule is not None and chunk_mbs, _kind(block), _shapes((call.args, call.kwargs)))
        if key not in self._costs:
            with self.mode, StorageCounter() as counter, self.context():
                self._costs[key] = _measure_chunk(block, _cut(block, call.name, rule, call.args, call.kwargs), counter)
        return self._costs[key]


def run_fake_step(
    module: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    *,
    blocks: Mapping[str, nn.Module],
    chunked: Sequence[str],
    rule: CutRule | None,
    dtypes: Dtypes,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> FakeStep:
    """Put ``module`` on fake tensors, for good, and run ``step`` once on a batch of fake tensors.

    Args:
        module: the whole model, on the meta device or any other.
        step: what is run with the batch; returns the loss, or a dict with it.
        batch: a micro-batch; its shapes and dtypes count.
        blocks: the modules that are recomputed, by name.
        chunked: names of those that are cut.
        rule: how they are cut.
        dtypes: dtypes of what is computed with.
        context: what steps run under (autocast).

    Raises:
        RuntimeError: the step needs values of tensors, or calls no block.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = FakeStep(blocks, frozenset(chunked), rule, mode, context)
    with mode:
        make_fake(module, dtypes)
        with StorageCounter() as counter:
            batch = map_tree(lambda x, _: _blank(x) if isinstance(x, Tensor) else x, batch)
            fake.outside = _Run(fake, counter, module).step(step, batch)
    if not fake.calls:
        raise RuntimeError("The step called none of the blocks, so there is nothing to plan for.")
    return fake


class _Run:
    """One step with stand-ins for its blocks."""

    def __init__(self, fake: FakeStep, counter: StorageCounter, module: nn.Module) -> None:
        self._fake, self._counter, self._module = fake, counter, module
        self._notices = Notices()
        self._before = counter.live
        self._held = -1
        self._returned = 0
        self._entries: list[Tensor] = []
        self._results: dict[Any, tuple[Any, Recorded]] = {}

    def step(self, step: Callable[[Any], Any], batch: Any) -> OutsideCost:
        counter = self._counter
        with self._stand_ins(), self._fake.context():
            counter.mark()
            output = step(batch)
        loss = _loss_of(output)
        held, returned = max(self._held, 0), self._returned
        forward = counter.peak - returned
        counter.mark()
        loss.backward()
        backward = counter.peak - returned
        del loss, output
        gradients = _gradient_bytes(self._module)
        roots = [entry for entry in self._entries if entry.grad_fn is not None]
        start = counter.mark() - gradients
        if roots:
            torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
        front = counter.peak - start - _gradient_bytes(self._module)
        return OutsideCost(
            held=held,
            forward=forward,
            backward=max(0, backward - gradients),
            gradients=gradients,
            front=max(0, front),
            flops=counter.flops,
        )

    @contextmanager
    def _stand_ins(self) -> Iterator[None]:
        with ExitStack() as undo:
            for name, block in self._fake.blocks.items():
                forward, names = own_forward(block)
                patched = block.__dict__.get("forward")
                block.forward = partial(self._stand_in, name, block, forward, names)
                undo.callback(_restore, block, patched)
            yield

    def _stand_in(
        self,
        name: str,
        block: nn.Module,
        forward: Callable[..., Any],
        names: tuple[str, ...],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        args, kwargs = drop_cache(name, names, args, kwargs, self._notices)
        with self._counter.paused():
            cut = cut_call(name, self._fake.rule_for(name, 1), names, args, kwargs, self._notices)
            if cut.sizes:
                self._fake.batch_size = sum(cut.sizes)
            entry = 0 if cut.entry is None else sum(piece.nbytes for piece in cut.pieces[cut.entry])
            real, recorded = self._result_of(block, partial(forward, *args, **kwargs), (args, kwargs))
            put_back({key: [_blank(value) for value in values] for key, values in recorded.items()})
        if self._held < 0:
            self._held = self._counter.live - entry
        tensors = [leaf for _, leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self._entries += tensors
        trained = bool(tensors) or any(p.requires_grad for p in block.parameters())
        output = map_tree(lambda x, _: _stand_in_for(x, trained), real)
        out = sum(leaf.nbytes for _, leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad)
        with self._counter.paused():
            kept = map_tree(lambda x, _: _blank(x) if isinstance(x, Tensor) else x, (args, kwargs))
        self._fake.calls.append(_Call(name, kept[0], kept[1], entry, out))
        self._returned = self._counter.live
        self._counter.mark()
        return output

    def _result_of(self, block: nn.Module, run: Callable[[], Any], arguments: Any) -> tuple[Any, Recorded]:
        """What a call returns, and what it records: run once for each kind of block, since only shapes count."""
        key = _kind(block), _shapes(arguments)
        if key not in self._results:
            with torch.no_grad():
                self._results[key] = taking_off(run)
        return self._results[key]


def _restore(block: nn.Module, patched: Any) -> None:
    del block.forward
    if patched is not None:
        block.forward = patched


def _blank(tensor: Tensor) -> Tensor:
    """A fake tensor of the same shape, dtype and need of a gradient; a parameter stands for itself."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return torch.empty_like(tensor, device="cpu", requires_grad=tensor.requires_grad)


def _stand_in_for(value: Any, trained: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_like(value, requires_grad=trained and value.is_floating_point())


def _loss_of(output: Any) -> Tensor:
    """The loss that a step returned; of anything else the sum of its floating tensors that need a gradient."""
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        output = output["loss"]
    leaves = [leaf for _, leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves:
        raise RuntimeError(
            "The step returned nothing with a gradient, so there is no backward pass to plan for. Return the loss from "
            "training_step, or plan with a module that has trainable parameters."
        )
    return leaves[0] if leaves[0].ndim == 0 else torch.stack([leaf.float().sum() for leaf in leaves]).sum()


def _gradient_bytes(module: nn.Module) -> int:
    return sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)


def _kind(block: nn.Module) -> tuple[Any, ...]:
    return type(block), tuple((p.shape, p.dtype, p.requires_grad) for p in block.parameters())


def _shapes(tree: Any) -> tuple[Any, ...]:
    leaves = [leaf for _, leaf in tree_leaves(tree)]
    return tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)


def _cut(block: nn.Module, name: str, rule: CutRule | None, args: Any, kwargs: Any) -> CutCall:
    return cut_call(name, rule, own_forward(block)[1], args, kwargs, Notices())


def _measure_chunk(block: nn.Module, cut: CutCall, counter: StorageCounter) -> ChunkCost:
    """Run one chunk twice: in the second run gradients of parameters exist, as for all chunks but the first."""
    forward, _ = own_forward(block)
    values = [v if isinstance(v, nn.Parameter) else _alone(v) for v in cut.chunk(0)]

    def run(*tensors: Tensor) -> Any:
        args, kwargs = fill(cut.template, tensors)
        return forward(*args, **kwargs)

    cost = ChunkCost(forward=0, backward=0, flops=0)
    for _ in range(2):
        start, flops = counter.mark(), counter.flops
        output = checkpoint(run, *values, use_reentrant=False, preserve_rng_state=False)
        in_forward, flops = counter.peak - start, counter.flops - flops
        roots = [leaf for _, leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        del output
        with counter.paused():
            gradients = [torch.empty_like(root) for root in roots]
        if roots:
            start = counter.mark()
            torch.autograd.backward(roots, gradients)
        cost = ChunkCost(forward=in_forward, backward=counter.peak - start if roots else 0, flops=flops)
        del roots, gradients
        for value in values:
            value.grad = None
    for parameter in block.parameters():
        parameter.grad = None
    return cost


def _alone(value: Tensor) -> Tensor:
    """A chunk's tensor in memory of its own."""
    return torch.empty(value.shape, dtype=value.dtype, requires_grad=value.requires_grad)
