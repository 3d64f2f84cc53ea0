"""The block calls of a window and their backward pass.

[Note: cuts and chains]
The graph is cut where a block call hands out its outputs, so the backward pass of what a step does after its last block
(the tail) stops there and frees its memory, one micro-batch at a time. Gradients that reach a cut are kept with the
call. Then the calls are back-propagated, last to first. A call whose incoming tensors were all handed out by one
earlier call takes the original outputs instead: the two are one graph and one run of autograd. A plain stack of blocks
is one run; code between blocks, a second tower or a second pass start a new one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from .block import BlockCall
from .guards import walk
from .trees import map_tree, tree_leaves


class _Exit:
    """A tensor that a block call has handed out, and the gradient that has reached it."""

    __slots__ = ("call", "edge", "grad")

    def __init__(self, call: _Call, output: Tensor) -> None:
        self.call = call
        # The edge and not the tensor, which is a hidden state: nothing needs its values any more.
        self.edge: GradientEdge = get_gradient_edge(output)
        self.grad: Tensor | None = None

    def collect(self, grad: Tensor) -> None:
        self.grad = grad if self.grad is None else self.grad + grad


class _Call:
    """One block call with gradients."""

    __slots__ = ("chained", "exits", "name", "nodes")

    def __init__(self, name: str) -> None:
        self.name = name
        self.exits: list[_Exit] = []
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
        if type(value) is not Tensor:
            return value.detach()
        # The same memory and yet no view: code between blocks may change it in place.
        return value.new_empty(0).set_(value)  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.exit.collect(grads[0])
        return None, None, None


class _Given(NamedTuple):
    """What a handed out tensor stands for."""

    exit: _Exit
    output: Tensor
    version: int


class BlockCalls:
    """Records the block calls of one window and back-propagates them."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        # By the tensor handed out and as long as it lives; its memory is the output's.
        self._given: Any = WeakTensorKeyDictionary()

    def run(self, name: str, calls: list[BlockCall], run: Callable[[Callable[[Any], Any]], list[Any]]) -> list[Any]:
        """Run a block for ``calls`` by ``run(hand_out)`` and return what the steps are given."""
        call = _Call(name)
        self._continue_chain(call, calls)
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

    def backward(self, before_last: Callable[[], None]) -> int:
        """Back-propagate all calls, last to first, and return the number of runs of autograd.

        Args:
            before_last: called before the last run.
        """
        continued = {id(call.chained) for call in self._calls if call.chained is not None}
        heads = [call for call in self._calls if id(call) not in continued]
        self._calls = []
        runs = 0
        while heads:
            roots = [e for call in heads.pop().chain() for e in call.exits if e.grad is not None]
            if not heads:
                before_last()
            if roots:
                runs += 1
                torch.autograd.backward([e.edge for e in roots], [e.grad for e in roots])
        return runs

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

    def _continue_chain(self, call: _Call, calls: list[BlockCall]) -> None:
        """Continue the graph of an earlier call if all that comes in was handed out by it, and is what it was then."""
        tensors = [t for c in calls for t in _grad_tensors((c.args, c.kwargs))]
        sources = [self._given[t] for t in tensors if t in self._given and self._given[t].version == t._version]
        if not sources or len(sources) < len(tensors):
            return
        earlier: _Call = sources[0].exit.call
        if earlier.chained is not None or any(s.exit.call is not earlier for s in sources):
            return
        earlier.chained = call
        for c in calls:
            c.args, c.kwargs = map_tree(self._original, (c.args, c.kwargs))

    def _original(self, value: Any, _path: str) -> Any:
        return self._given[value].output if isinstance(value, Tensor) and value.requires_grad else value

    def _hand_out(self, call: _Call, output: Any) -> Any:
        start = torch.empty(0, requires_grad=True)

        def give(value: Any, _path: str) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            exit_ = _Exit(call, value)
            call.exits.append(exit_)
            handed = _HandOut.apply(start, value.detach(), exit_)
            self._given[handed] = _Given(exit_, value, handed._version)
            return handed

        return map_tree(give, output)


def _grad_tensors(tree: Any) -> list[Tensor]:
    return [leaf for _, leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _sequence_number() -> int:
    return torch._C._autograd._get_sequence_nr()
