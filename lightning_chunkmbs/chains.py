"""The block calls of a window and their backward pass.

[Note: cuts and chains]
The graph is cut where a block call hands out its outputs, so the backward pass of what a step does after its last block
(the tail) stops there and frees its memory, one micro-batch at a time. Gradients that reach a cut are kept with the
call. Then the calls are back-propagated, last to first. A call whose incoming tensors were all handed out by one
earlier call takes the original outputs instead: the two are one graph and one run of autograd. A plain stack of blocks
is one run; code between blocks, a second tower or a second pass start a new one.

[Note: what runs share]
Code outside blocks can be behind several runs and tails (an embedding that every block is given, say). Autograd frees a
graph when it has gone through it, so of several runs only the last may go through such a part: the others are cut where
they enter their block, and what has come back there goes on into that part, which is retained.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx
from torch.autograd.graph import Node
from torch.utils.weak import WeakTensorKeyDictionary

from .block import BlockCall
from .chunked_tensor import refuse_late_hooks, same_values
from .guards import walk
from .host_functions import grad_to_host
from .host_tensor import HostTensor
from .trees import leaves, map_tree


class _Exit:
    """A tensor that a block call has handed out, and the gradient that has reached it."""

    __slots__ = ("__weakref__", "_away", "call", "grad", "root")

    def __init__(self, call: _Call, output: Tensor) -> None:
        # Weak, so that calls that are never back-propagated go without waiting for the garbage collector.
        self.call = weakref.ref(call)
        self.grad: Tensor | None = None
        # Where the output waits on the host, so does its gradient.
        self._away: Callable[[Tensor], Tensor] | None = None
        if isinstance(output, HostTensor):
            self._away = partial(grad_to_host, sizes=output.sizes, dim=output.parts_dim, put=output.put_fn)
        # In place of the output, which is a hidden state: nothing needs its values any more.
        self.root: Tensor = _Root.apply(output, self)

    def collect(self, grad: Tensor) -> None:
        total = grad if self.grad is None else self.grad + grad
        self.grad = total if self._away is None else self._away(total)

    def take(self) -> Tensor | None:
        grad, self.grad = self.grad, None
        return grad


class _Root(Function):
    """An empty tensor to start a run of autograd from. It brings in the gradient that waits at an exit.

    Given to autograd as they are, the gradients of all exits would live until the run has ended.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, exit_: _Exit) -> Tensor:
        # Not the exit itself, which holds this node.
        ctx.take = weakref.WeakMethod(exit_.take)
        return torch.empty(0, dtype=output.dtype, device=output.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        take = ctx.take()
        return None if take is None else take(), None


class _Probe:
    """Tells whether a tensor was changed in place, without its memory: the version counter is shared."""

    def __init__(self, tensor: Tensor) -> None:
        self._alias = tensor.detach()
        self._alias.data = tensor.new_empty(0)
        self._version = tensor._version
        self._tensor = weakref.ref(tensor)

    def check_hooks(self) -> None:
        tensor = self._tensor()
        if tensor is not None:
            refuse_late_hooks(tensor)

    @property
    def changed(self) -> bool:
        return self._alias._version != self._version


class _Call:
    """One block call with gradients."""

    __slots__ = ("__weakref__", "chained", "entries", "exits", "name", "nodes", "probes")

    def __init__(self, name: str) -> None:
        self.name = name
        self.exits: list[_Exit] = []
        self.entries: list[_Exit] = []  # where the graph is cut before the block (see [Note: what runs share])
        self.probes: list[_Probe] = []  # of tensors that it saved by the outputs they stand for
        self.nodes = range(0)  # sequence numbers of the autograd nodes made inside
        self.chained: _Call | None = None  # the call that continues this one's graph

    def chain(self) -> list[_Call]:
        """Return this call and those that continue its graph."""
        calls = [self]
        while calls[-1].chained is not None:
            calls.append(calls[-1].chained)
        return calls


class _HandOut(Function):
    """Cuts the graph: gives a tensor's values on and keeps the gradient that comes back."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, value: Tensor, exit_: _Exit) -> Tensor:
        ctx.exit = exit_
        # The same memory and yet no view: code between blocks may change it in place.
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.exit.collect(grads[0])
        return None, None, None


class _Given(NamedTuple):
    """What a handed out tensor stands for."""

    exit: _Exit
    output: Tensor
    version: int

    def unchanged(self, handed: Tensor) -> bool:
        """Return whether what was handed out still has the output's values."""
        return handed._version == self.version and same_values(handed, self.output)


class BlockCalls:
    """Records the block calls of one window and back-propagates them."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        # By the tensor handed out and as long as it lives; its memory is the output's.
        self._given: Any = WeakTensorKeyDictionary()
        # Nodes outside blocks through which the runs of calls made so far will go.
        self._ahead: set[Node] = set()

    def run(self, name: str, calls: list[BlockCall], run: Callable[[Callable[[Any], Any]], list[Any]]) -> list[Any]:
        """Run a block for ``calls`` by ``run(hand_out)`` and return what the steps are given."""
        call = _Call(name)
        if not self._continue_chain(call, calls):
            self._cut_shared(call, calls)
        first = _sequence_number()
        outputs = run(lambda joined: self._hand_out(call, joined))
        call.nodes = range(first, _sequence_number())
        self._calls.append(call)
        return outputs

    def add_idle(self, name: str, output: Tensor) -> None:
        """Record a call made without a micro-batch; ``output`` is back-propagated with zero gradient."""
        call = _Call(name)
        call.exits.append(_Exit(call, output))
        call.exits[0].grad = torch.zeros_like(output)
        self._calls.append(call)

    def backward(self, expect: Callable[[list[str]], None], before_last: Callable[[], None]) -> int:
        """Back-propagate all calls, last to first, and return the number of runs of autograd.

        Args:
            expect: called with the names of the blocks, in the order in which they are back-propagated.
            before_last: called before the last run.
        """
        continued = {id(call.chained) for call in self._calls if call.chained is not None}
        heads = [call for call in self._calls if id(call) not in continued]
        expect([call.name for head in reversed(heads) for call in reversed(head.chain()) if call.exits])
        self._calls = []
        self._ahead.clear()
        runs = 0
        while heads:
            head = heads.pop()
            _refuse_changed(head.chain())
            if not heads:
                before_last()
            runs += _run([e for call in head.chain() for e in call.exits])
            runs += _run(head.entries, retain_graph=True)
        return runs

    def goes_ahead(self, node: Node) -> bool:
        """Return whether the run of a block call made so far will go through a graph node outside blocks."""
        return node in self._ahead

    def is_cut(self, node: Node) -> bool:
        """Return whether a graph node is one at which the graph is cut."""
        return isinstance(node, FunctionCtx) and isinstance(getattr(node, "exit", None), _Exit)

    def refuse_inner(self, output: Any) -> None:
        """Refuse what a step returned if it reaches the inside of a block by another way than what was handed out."""
        for node in walk(_grad_tensors(output)):
            number = node._sequence_nr() if hasattr(node, "_sequence_nr") else -1
            name = next((call.name for call in self._calls if number in call.nodes), None)
            if name is not None and not self.is_cut(node):
                raise RuntimeError(
                    f"In lockstep a loss reaches a block only through what the block returns, and this one reaches the "
                    f"inside of {name} (a tensor kept by a hook or an attribute, say). Return that tensor from the "
                    f"block, or write max_lockstep: 1 in chunkmbs_plan."
                )

    def _cut_shared(self, call: _Call, calls: list[BlockCall]) -> None:
        """Cut the graph before the block where an earlier call's run will go through the same part of it."""
        for c in calls:
            arguments = (c.args, c.kwargs)
            nodes = {n for n in walk(_grad_tensors(arguments)) if not self.is_cut(n) and not hasattr(n, "variable")}
            if not self._ahead.isdisjoint(nodes):
                c.args, c.kwargs = map_tree(partial(self._cut_entry, call, {}), arguments)
            self._ahead |= nodes

    def _cut_entry(self, call: _Call, done: dict[int, Tensor], value: Any, _path: str) -> Any:
        if not isinstance(value, Tensor) or value.grad_fn is None:
            return value
        if id(value) not in done:
            call.entries.append(_Exit(call, value))
            done[id(value)] = _cut(value, call.entries[-1])
        return done[id(value)]

    def _continue_chain(self, call: _Call, calls: list[BlockCall]) -> bool:
        """Continue the graph of an earlier call if all that comes in was handed out by it, and is what it was then."""
        tensors = [t for c in calls for t in _grad_tensors((c.args, c.kwargs))]
        found = [(t, self._given.get(t)) for t in tensors]
        sources = [given for t, given in found if given is not None and given.unchanged(t)]
        if not sources or len(sources) < len(tensors):
            return False
        earlier: _Call | None = sources[0].exit.call()
        if earlier is None or earlier.chained is not None or any(s.exit.call() is not earlier for s in sources):
            return False
        if any(t._backward_hooks or t.retains_grad for t in tensors):
            return False  # these belong to what was handed out, which a chain would leave out
        earlier.chained = call
        call.probes = [_Probe(t) for t in tensors]
        for c in calls:
            c.args, c.kwargs = map_tree(self._original, (c.args, c.kwargs))
        return True

    def _original(self, value: Any, _path: str) -> Any:
        return self._given[value].output if isinstance(value, Tensor) and value.requires_grad else value

    def _hand_out(self, call: _Call, output: Any) -> Any:
        def give(value: Any, _path: str) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            exit_ = _Exit(call, value)
            call.exits.append(exit_)
            handed = _cut(value, exit_)
            self._given[handed] = _Given(exit_, value, handed._version)
            return handed

        return map_tree(give, output)


def _cut(value: Tensor, exit_: _Exit) -> Tensor:
    cut: Tensor = _HandOut.apply(torch.empty(0, requires_grad=True), value.detach(), exit_)
    return cut


def _refuse_changed(calls: list[_Call]) -> None:
    for call in calls:
        for probe in call.probes:
            probe.check_hooks()
        if any(probe.changed for probe in call.probes):
            raise RuntimeError(
                f"What {call.name} was called with has been modified by an inplace operation since, and its backward "
                f"pass needs the former values. Write x = x + y in place of x += y where the block's input is changed."
            )


def _run(exits: list[_Exit], retain_graph: bool = False) -> int:
    """Back-propagate what has reached ``exits`` and return the number of runs of autograd, one or none."""
    roots = [e for e in exits if e.grad is not None]
    if roots:
        torch.autograd.backward(
            [e.root for e in roots], [torch.empty_like(e.root) for e in roots], retain_graph=retain_graph
        )
    return len(roots[:1])


def _grad_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _sequence_number() -> int:
    return torch._C._autograd._get_sequence_nr()
