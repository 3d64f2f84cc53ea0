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
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .arguments import CutCall, CutRule, cut_call
from .block import own_forward
from .caches import drop_cache
from .dtypes import Dtypes
from .fake_chunk import ChunkCost, measure_chunk
from .fake_save_ops import FakeSaveOps
from .fake_tensors import make_fake
from .recorders import Recorded, put_back, taking_off
from .report import Notices
from .step_bytes import Outside
from .storages import StorageCounter
from .trees import leaves, map_tree

__all__: list[str] = []


@dataclass(eq=False)
class _Call:
    """A call of a block with one micro-batch, of which shapes are kept."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    entry: int  # bytes of the activation from which it is recomputed
    exit: int  # bytes of what it returned
    held: int  # bytes alive outside blocks when it is made
    sides: int  # bytes of gradients of tensors that earlier calls were given too
    trained: bool  # whether it is back-propagated
    fixed: bool  # whether what it is recomputed from needs no gradient, and so stays where it is


@dataclass
class FakeStep:
    """A module on fake tensors, and the calls of blocks that one of its steps makes.

    Made by :func:`run_fake_step`.

    Attributes:
        outside: cost of a micro-batch outside blocks.
        calls: the calls of blocks, in order.
        batch_size: samples of a micro-batch, as the cut blocks see it.
        save: keeps results of operators in blocks.
    """

    blocks: Mapping[str, nn.Module]
    chunked: frozenset[str]
    rule: CutRule | None
    mode: FakeTensorMode
    context: Callable[[], AbstractContextManager[Any]]
    dtypes: Dtypes = field(default_factory=Dtypes)
    save: FakeSaveOps = field(default_factory=lambda: FakeSaveOps(()))
    outside: Outside = field(
        default_factory=lambda: Outside(held=0, forward=0, backward=0, again=0, gradients=0, front=0, flops=0)
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
                cut = _cut(block, call.name, rule, call.args, call.kwargs)
                self._costs[key] = measure_chunk(block, cut, counter, self.dtypes, self.save)
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
    save_ops: Sequence[str] = (),
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
        save_ops: names of operators whose results blocks keep.

    Raises:
        RuntimeError: the step needs values of tensors, or calls no block.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = FakeStep(blocks, frozenset(chunked), rule, mode, context, dtypes, FakeSaveOps(save_ops))
    with mode:
        make_fake(module, dtypes)
        with StorageCounter((*module.parameters(), *module.buffers())) as counter:
            fake.outside = _Run(fake, counter, module).outside(step, batch)
    if not fake.calls:
        cause = "plans name others, or a function that was made in __init__ calls those of another copy"
        raise RuntimeError(f"The step called none of the blocks, so there is nothing to plan for: {cause}.")
    return fake


class _Run:
    """One step with stand-ins for its blocks."""

    def __init__(self, fake: FakeStep, counter: StorageCounter, module: nn.Module) -> None:
        self._fake, self._counter, self._module = fake, counter, module
        self._notices = Notices()
        self._returned = 0
        self._given: list[Tensor] = []
        self._entries: list[tuple[GradientEdge, torch.Size, torch.dtype]] = []
        self._results: dict[Any, tuple[Any, Recorded]] = {}

    def outside(self, step: Callable[[Any], Any], batch: Any) -> Outside:
        """Run the step twice: in the second run gradients exist, as for all micro-batches but the first."""
        counter = self._counter
        loss, forward = self._forward(step, batch)
        flops = counter.flops
        backward = self._backward(loss)
        del loss
        gradients = _gradient_bytes(self._module)
        held = counter.live - gradients
        self._given.clear()
        front = self._front(gradients)
        calls = [*self._fake.calls]
        again = self._backward(self._forward(step, batch)[0])
        self._entries.clear()
        self._given.clear()
        self._fake.calls = calls
        return Outside(
            held=held,
            forward=forward,
            backward=max(0, backward - gradients),
            again=again,
            gradients=gradients,
            front=max(0, front),
            flops=flops,
        )

    def _forward(self, step: Callable[[Any], Any], batch: Any) -> tuple[Tensor, int]:
        self._counter.mark()
        with self._stand_ins(), self._fake.context():
            with self._counter.paused():
                batch = map_tree(_blank_leaf, batch)  # a copy each time, since steps take their labels out
            output = step(batch)
        return _loss_of(output), self._counter.peak - self._returned

    def _backward(self, loss: Tensor) -> int:
        self._counter.mark()
        loss.backward()
        return self._counter.peak - self._returned

    def _front(self, gradients: int) -> int:
        """Back-propagate what comes before blocks; ``gradients`` are there already."""
        edges, self._entries = self._entries, []
        start = self._counter.mark() - gradients
        if edges:
            roots = [edge for edge, _, _ in edges]
            torch.autograd.backward(roots, [torch.empty(shape, dtype=dtype) for _, shape, dtype in edges])
        return self._counter.peak - start - _gradient_bytes(self._module)

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
        _refuse_packed(name, self._fake.rule_for(name, 1), kwargs)
        with self._counter.paused():
            cut = cut_call(name, self._fake.rule_for(name, 1), names, args, kwargs, self._notices)
            if cut.sizes:
                self._fake.batch_size = sum(cut.sizes)
            fixed = cut.entry is None
            main = _main((args, kwargs), fixed)
            entry = 0 if main is None else main.nbytes
            real, recorded = self._result_of(block, forward, args, kwargs)
            put_back({key: [_blank(value) for value in values] for key, values in recorded.items()})
        held = self._counter.live - entry
        given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        tensors = [x for x in given if x.requires_grad]
        # Not the tensors, which would live longer than they do in a step.
        self._entries += [(get_gradient_edge(x), x.shape, x.dtype) for x in tensors if x.grad_fn is not None]
        trained = torch.is_grad_enabled() and (bool(tensors) or any(p.requires_grad for p in block.parameters()))
        output = map_tree(lambda x, _: _stand_in_for(x, trained), real)
        out = sum(leaf.nbytes for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad)
        with self._counter.paused():
            kept = map_tree(_blank_leaf, (args, kwargs))
        # Of what one block gives to the next, a gradient comes as the other goes; of what several are given, it stays.
        sides = sum({id(x): x.nbytes for x in tensors if any(x is y for y in self._given)}.values())
        self._fake.calls.append(_Call(name, kept[0], kept[1], entry, out, held, sides, trained, fixed))
        self._given += [x for x in given if x is not main]  # recomputation needs them
        self._returned = self._counter.live
        self._counter.mark()
        return output

    def _result_of(
        self, block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Recorded]:
        """What a call returns, and what it records: run once for each kind of block, since only shapes count."""
        key = _kind(block), _shapes((args, kwargs))
        if key not in self._results:
            args, kwargs = map_tree(self._cast, (args, kwargs))
            with torch.no_grad():
                output, recorded = taking_off(partial(forward, *args, **kwargs))
            self._results[key] = self._fake.dtypes.cast_output(output), recorded
        return self._results[key]

    def _cast(self, leaf: Any, _path: str) -> Any:
        return self._fake.dtypes.cast_call([leaf])[0] if isinstance(leaf, Tensor) else leaf


def _refuse_packed(name: str, rule: CutRule | None, kwargs: dict[str, Any]) -> None:
    given = [key for key in (rule.packed_kwarg_names if rule else ()) if kwargs.get(key) is not None]
    if given:
        raise ValueError(
            f"A plan is made from shapes alone, and how packed sequences are cut depends on their lengths; {name} was "
            f"given {', '.join(given)}. Write chunk_mbs or chunk_tokens as a number, and measure a step."
        )


def _main(arguments: Any, fixed: bool) -> Tensor | None:
    """The hidden states that a block is recomputed from; ``fixed``: they need no gradient."""
    floating = [leaf for leaf in leaves(arguments) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return next((x for x in floating if not isinstance(x, nn.Parameter) and (fixed or x.requires_grad)), None)


def _restore(block: nn.Module, patched: Any) -> None:
    del block.forward
    if patched is not None:
        block.forward = patched


def _blank(tensor: Tensor) -> Tensor:
    """A fake tensor of the same shape, dtype and need of a gradient; a parameter stands for itself."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return torch.empty_like(tensor, device="cpu", requires_grad=tensor.requires_grad)


def _blank_leaf(leaf: Any, _path: str) -> Any:
    return _blank(leaf) if isinstance(leaf, Tensor) else leaf


def _stand_in_for(value: Any, trained: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_like(value, requires_grad=trained and value.is_floating_point())


def _loss_of(output: Any) -> Tensor:
    """The loss that a step returned; of anything else the sum of its floating tensors that need a gradient."""
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        output = output["loss"]
    found = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not found:
        raise RuntimeError(
            "The step returned nothing with a gradient, so there is no backward pass to plan for. Return the loss from "
            "training_step, or plan with a module that has trainable parameters."
        )
    return found[0] if found[0].ndim == 0 else torch.stack([leaf.float().sum() for leaf in found]).sum()


def _gradient_bytes(module: nn.Module) -> int:
    return sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)


def _kind(block: nn.Module) -> tuple[Any, ...]:
    return type(block), tuple((p.shape, p.dtype, p.requires_grad) for p in block.parameters())


def _shapes(tree: Any) -> tuple[Any, ...]:
    return tuple((x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else repr(x) for x in leaves(tree))


def _cut(block: nn.Module, name: str, rule: CutRule | None, args: Any, kwargs: Any) -> CutCall:
    return cut_call(name, rule, own_forward(block)[1], args, kwargs, Notices())
