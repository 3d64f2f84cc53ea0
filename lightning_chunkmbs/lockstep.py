"""Lockstep: the training steps of a window side by side, and the backward pass that follows.

[Note: taking turns]
Each step runs in a greenlet of one thread. Where it calls a block it hands over its arguments and pauses. When all
steps wait or have ended, the block that comes first in definition order runs once for all steps waiting at it, and
these go on in order. (Threads would number autograd nodes each by itself, and the chunks' backwards would interleave.)
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import nn

from .agree import Agree
from .block import BlockCall, block_settings, run_block, run_idle_block
from .chains import BlockCalls
from .guards import Guards, no_reentrant_checkpoint
from .sharding import ShardedModel
from .step_attributes import StepAttributes
from .step_state import ThreadState

_NOTHING = 1 << 30


class _Request(NamedTuple):
    """A step's call of a block, waiting to be run."""

    block: int
    call: BlockCall
    state: ThreadState

    @property
    def key(self) -> tuple[Any, ...]:
        """Calls of one block that agree in this run together."""
        return self.state.grad, self.state.autocast, self.state.autocast_dtypes


class _Step:
    """One training step of the window."""

    def __init__(self, index: int, fn: Callable[[], Any], state: ThreadState) -> None:
        self.index = index
        self.greenlet = greenlet(fn)
        self.greenlet.gr_context = contextvars.copy_context()
        self.state = state
        self.request: _Request | None = None

    def take_call(self, modes_of: Callable[[int], AbstractContextManager[None]], base: ThreadState) -> BlockCall:
        """Return the call that waits, to be run from state ``base`` in the step's; the step keeps no hold of it."""
        request, self.request = self.request, None
        if request is None:
            raise AssertionError("a step that is to run a block waits for it")
        return BlockCall(request.call.args, request.call.kwargs, partial(self.run, modes_of, base))

    def run(
        self, modes_of: Callable[[int], AbstractContextManager[None]], base: ThreadState, fn: Callable[[], Any]
    ) -> Any:
        """Run ``fn`` in the paused step's state, contextvars and modes of modules; the thread's state is ``base``."""
        self.state.apply(base)
        context = self.greenlet.gr_context
        try:
            with modes_of(self.index):
                return fn() if context is None else context.run(fn)
        finally:
            base.apply()


class Lockstep:
    """Runs one window of training steps.

    Args:
        sharded: the model's groups; used inside one of its root calls.
        attributes: keeps attributes that steps assign apart.
        on_turn: called with a step's index before it runs or goes on.
        agree: agrees with the other ranks on the next block; None when all ranks surely call the same blocks.
        record_collectives: note the collectives that steps run, for :attr:`collectives`.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        attributes: StepAttributes,
        *,
        on_turn: Callable[[int], None],
        agree: Agree | None = None,
        record_collectives: bool = False,
    ) -> None:
        self._sharded = sharded
        self._attributes = attributes
        self._on_turn = on_turn
        self._agree = agree
        self._index = {block: i for i, block in enumerate(sharded.blocks)}
        self._steps: list[_Step] = []
        self._running: _Step | None = None
        self._ending = False
        self._calls = BlockCalls()
        self._guards = Guards(
            lambda: self.current, self._calls.is_cut, self._calls.goes_ahead, record_collectives=record_collectives
        )
        self.runs = 0  # of autograd in the last backward

    @property
    def collectives(self) -> list[tuple[int, str, tuple[int, ...]]]:
        """Step, name and shape of each collective that steps ran, in order, when they were recorded."""
        return self._guards.collectives

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, steps: Sequence[Callable[[], Any]], finish: Callable[[int, Any], None]) -> None:
        """Run the steps side by side.

        Args:
            steps: the training steps, in order.
            finish: called with a step's index and what it returned as soon as it has ended. It back-propagates the
                step's loss, which stops at the blocks.

        Raises:
            RuntimeError: a step did what cannot be done in lockstep. Whatever a step raises is raised here, after the
                other steps have been ended.
        """
        base = ThreadState.now()
        self._steps = [_Step(i, fn, base) for i, fn in enumerate(steps)]
        with self._requests_come_here(), self._guards.installed(), self._attributes.watching():
            try:
                for step in self._steps:
                    self._resume(step, base, finish)
                while (group := self._next_group()) is not None:
                    self._run_group(*group, base, finish)
            finally:
                self._end_steps()
                base.apply()

    @contextmanager
    def _requests_come_here(self) -> Iterator[None]:
        settings = [block_settings(block) for block in self._sharded.blocks]
        before = [s.dispatch for s in settings]
        for s in settings:
            s.dispatch = self._request
        try:
            yield
        finally:
            for s, dispatch in zip(settings, before, strict=True):
                s.dispatch = dispatch

    def _request(self, block: nn.Module, call: BlockCall) -> Any:
        """Called inside a step where it calls a block: hand the call over and pause."""
        if self._ending:
            raise GreenletExit
        step = self._running
        if step is None or getcurrent() is not step.greenlet or torch.is_inference_mode_enabled():
            # Inference mode has no setter to switch it with, so such a call runs at once.
            return run_block(block, [call])[0]
        if self._guards.forks.get(step.index):
            raise RuntimeError(
                f"In lockstep steps take turns at every block, and {block_settings(block).name} was called inside "
                f"torch.random.fork_rng, which would set the random state of other steps back. Call the block outside "
                f"of it, or write max_lockstep: 1 in chunkmbs_plan."
            )
        parent = step.greenlet.parent
        return parent.switch(_Request(self._index[block], call, ThreadState.now()))

    def _resume(self, step: _Step, base: ThreadState, finish: Callable[[int, Any], None], *value: Any) -> None:
        """Let a step run until it waits at a block or ends; the thread's state is ``base``."""
        result = self._turn(step, base, step.greenlet.switch, *value)
        step.request = None if step.greenlet.dead else result
        if step.greenlet.dead:
            self._calls.refuse_inner(result)
            finish(step.index, result)

    def _turn(self, step: _Step, base: ThreadState, switch: Callable[..., Any], *value: Any) -> Any:
        self._on_turn(step.index)
        self._attributes.enter(step.index)
        self._running = step
        step.state.apply(base)
        result = None
        try:
            result = switch(*value)
            return result
        finally:
            step.state = result.state if isinstance(result, _Request) else ThreadState.now()
            self._running = None
            self._attributes.leave(step.index, ended=step.greenlet.dead)
            base.apply(step.state)

    def _end_steps(self) -> None:
        """End steps that still wait: their `finally` blocks run, what they call no longer does."""
        self._ending = True
        for step in self._steps:
            if step.greenlet and not step.greenlet.dead:
                # What a step raises while it ends would hide why it had to end.
                with suppress(BaseException):
                    self._turn(step, ThreadState.now(), step.greenlet.throw)

    @property
    def current(self) -> int | None:
        """Index of the step that runs now; None outside steps."""
        return None if self._running is None else self._running.index

    # -- block calls --------------------------------------------------------------------------------------------------

    def _next_group(self) -> tuple[int, bool, list[_Step]] | None:
        """Return the next block, whether it runs with gradients, and the steps that wait for it."""
        waiting = [(step, step.request) for step in self._steps if step.request is not None]
        proposal = min((2 * r.block + r.state.grad for _, r in waiting), default=_NOTHING)
        if self._agree is not None:
            [proposal] = self._agree([proposal])
        if proposal == _NOTHING:
            return None
        block, grad = divmod(proposal, 2)
        at_block = [(s, r) for s, r in waiting if r.block == block and r.state.grad == bool(grad)]
        return block, bool(grad), [s for s, r in at_block if r.key == at_block[0][1].key]

    def _run_group(
        self, index: int, grad: bool, steps: list[_Step], base: ThreadState, finish: Callable[[int, Any], None]
    ) -> None:
        """Run a block for ``steps``, and these until they wait again; the thread's state is ``base``."""
        block = self._sharded.blocks[index]
        with torch.set_grad_enabled(grad):
            if not steps:
                self._run_idle(block, grad)
                return
            try:
                values = self._run_block(block, steps, base._replace(grad=grad))
            except BaseException as error:
                self._raise_in(steps[0], error)
        for step, value in zip(steps, values, strict=True):
            self._resume(step, base, finish, value)

    def _run_block(self, block: nn.Module, steps: list[_Step], base: ThreadState) -> list[Any]:
        calls = [s.take_call(self._attributes.modes_of, base) for s in steps]
        if not base.grad:
            return run_block(block, calls)
        name = block_settings(block).name
        return self._calls.run(name, calls, lambda hand_out: run_block(block, calls, hand_out))

    def _run_idle(self, block: nn.Module, grad: bool) -> None:
        """Take part in a block call for which no step of this rank waits."""
        output = run_idle_block(block)
        if grad:
            self._calls.add_idle(block_settings(block).name, output)

    def _raise_in(self, step: _Step, error: BaseException) -> None:
        """Raise what a block raised, with the step that called it in the traceback."""
        self._turn(step, ThreadState.now(), step.greenlet.throw, error)
        raise error

    def guarded(self) -> AbstractContextManager[None]:
        """Return a context for back-propagating a tail after :meth:`forward`."""
        return self._guards.installed()

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(self) -> None:
        """Back-propagate the block calls, last to first; the root group is reduced with the last run."""
        with no_reentrant_checkpoint(), self._sharded.reduced_after() as before_last:
            self.runs = self._calls.backward(self._sharded.prefetch.expect_backward, before_last)
