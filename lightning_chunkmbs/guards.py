"""What a step must not do while steps take turns, and what its collectives are: watched while a window runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node

from .fsdp2 import in_backward

# FSDP2's node over the inputs of a block call.
_BLOCK_NODE = "RegisterPostBackwardFunctionBackward"

_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)


class Guards:
    """Watches the calls of a window's steps.

    Args:
        current: returns the index of the step that runs now, or None outside steps.
        is_cut: tells whether a graph node belongs to a tensor that a block handed out, where the graph is cut.
        is_needed: tells whether a graph node is needed after the backward pass of a step's tail.
        record_collectives: note the collectives that steps run.

    Attributes:
        forks: how many ``fork_rng`` contexts each step is in.
        collectives: names and shapes of the collectives that steps ran, in order.
    """

    def __init__(
        self,
        current: Callable[[], int | None],
        is_cut: Callable[[Node], bool],
        is_needed: Callable[[Node], bool],
        *,
        record_collectives: bool,
    ) -> None:
        self._current = current
        self._is_cut = is_cut
        self._is_needed = is_needed
        self._record = record_collectives
        self.forks: dict[int, int] = {}
        self.collectives: list[tuple[int, str, tuple[int, ...]]] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch inside this context."""
        with ExitStack() as stack:
            stack.enter_context(_replaced(torch.random, "fork_rng", self._fork_rng(torch.random.fork_rng)))
            stack.enter_context(no_reentrant_checkpoint())
            backward = self._retaining(self._autograd("backward", torch.autograd.backward))
            stack.enter_context(_replaced(torch.autograd, "backward", backward))
            stack.enter_context(_replaced(torch.autograd, "grad", self._autograd("grad", torch.autograd.grad)))
            for name in _COLLECTIVES if self._record else ():
                stack.enter_context(_replaced(dist, name, self._collective(name, getattr(dist, name))))
            yield

    def _fork_rng(self, fork_rng: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def wrapped(*args: Any, **kwargs: Any) -> Iterator[None]:
            step = self._current()
            with fork_rng(*args, **kwargs):
                if step is None:
                    yield
                    return
                self.forks[step] = self.forks.get(step, 0) + 1
                try:
                    yield
                finally:
                    self.forks[step] -= 1

        return wrapped

    def _autograd(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapped(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._current() is not None and any(self._is_cut(node) for node in walk(tensors)):
                raise RuntimeError(
                    f"In lockstep the graph is cut at every block, and torch.autograd.{name} was called inside a "
                    f"training_step through a block. Write max_lockstep: 1 in chunkmbs_plan, or make what is to be "
                    f"differentiated part of the loss."
                )
            return fn(tensors, *args, **kwargs)

        return wrapped

    def _retaining(self, backward: Callable[..., None]) -> Callable[..., None]:
        """Let a tail's backward pass retain a graph of which a block call's run will need a part."""

        @functools.wraps(backward)
        def wrapped(
            tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, *args: Any, **kwargs: Any
        ) -> None:
            needed = self._current() is None and any(self._is_needed(node) for node in walk(tensors))
            backward(tensors, grad_tensors, True if needed else retain_graph, *args, **kwargs)

        return wrapped

    def _collective(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            step = self._current()
            if step is not None and dist.get_world_size(kwargs.get("group")) > 1:
                tensor = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
                self.collectives.append((step, name, () if tensor is None else tuple(tensor.shape)))
            return fn(*args, **kwargs)

        return wrapped


@contextmanager
def no_reentrant_checkpoint() -> Iterator[None]:
    """Refuse blocks in reentrant checkpoints: these back-propagate a block once for each step, which reduces once."""
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def wrapped(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if in_backward() and any(node.name() == _BLOCK_NODE for node in walk(tensors)):
            raise RuntimeError(
                "In lockstep a block was called inside torch.utils.checkpoint.checkpoint(use_reentrant=True), which "
                "back-propagates it once for each micro-batch. Write use_reentrant=False or take the checkpoint "
                "off (blocks are recomputed anyway), or write max_lockstep: 1 in chunkmbs_plan."
            )
        backward(tensors, *args, **kwargs)

    with _replaced(torch.autograd, "backward", wrapped):
        yield


@contextmanager
def single_step(gather_again: Callable[[], None]) -> Iterator[None]:
    """Let a step that runs alone call ``torch.autograd.grad`` through blocks.

    Args:
        gather_again: gathers what FSDP2 reshards at the end of every backward pass.
    """
    grad = torch.autograd.grad

    @functools.wraps(grad)
    def wrapped(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        # Positions: inputs, grad_outputs, retain_graph, create_graph.
        create_graph = kwargs.get("create_graph") or (len(args) > 3 and args[3])
        if create_graph and any(node.name() == _BLOCK_NODE for node in walk(outputs)):
            raise RuntimeError(
                "A block is recomputed in backward, and gradients of gradients (create_graph=True) through it would "
                "need its parameters after they are freed. Compute this loss with Lightning's ModelParallelStrategy, "
                "or on a path without blocks."
            )
        result = grad(outputs, *args, **kwargs)
        gather_again()
        return result

    with _replaced(torch.autograd, "grad", wrapped):
        yield


def walk(tensors: Any) -> Iterator[Node]:
    """Visit every node of the graph behind ``tensors`` once."""
    listed = tensors if isinstance(tensors, (tuple, list)) else [tensors]
    todo: list[Any] = [getattr(t, "grad_fn", None) for t in listed]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        todo.extend(following for following, _ in node.next_functions)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
