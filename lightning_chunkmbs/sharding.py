"""The calls of a model that run with its root group gathered.

[Note: hooks taken off]
FSDP2 gathers and reduces in forward hooks. For blocks, the root and every further group outside blocks these hooks are
taken off the modules and called by hand: around all chunks of a block call, and around a whole step for the root.

[Note: nested groups]
A group inside a block (experts) is gathered and reduced with the block's own, once for all chunks and on every rank,
whether chunks use it or not.

[Note: further groups]
A group outside the blocks (a model inside the LightningModule, a head) is gathered when a step begins and stays so.
Without hooks of its own it is reduced and resharded by FSDP2's final callback of backward, like the root group: one
gather and one reduce-scatter, wherever and however often its modules are called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from .failures import is_communication_error
from .fsdp2 import (
    begin_backward_once,
    clear_shard_gradients,
    count_collectives,
    drop_unreduced,
    finish_backward,
    follow_shards,
    fsdp_module,
    fsdp_state,
    gather_beside_computing,
    gathered_params,
    in_backward,
    is_unsharded,
    join_groups,
    keep_casts,
    nested_groups,
    reset_pass,
    reshard,
    take_hooks_off,
    versions,
    write_back,
)
from .groups import no_inference
from .prefetch import Prefetch
from .report import StepCounter
from .unused import Unused


class ShardedModel:
    """A model in FSDP2 groups, and the calls that may use it.

    Args:
        root: the LightningModule, sharded by :func:`shard`.
        blocks: its blocks.
        counter: counts the collectives.
        prefetch: gathers the next blocks ahead.
        unused: gives zeros for gradients to what only other ranks use.
    """

    def __init__(
        self, root: nn.Module, blocks: Sequence[nn.Module], counter: StepCounter, prefetch: Prefetch, unused: Unused
    ) -> None:
        self.root = root
        self.prefetch = prefetch
        self.unused = unused
        self.blocks = list(blocks)
        inside = {module for block in blocks for module in block.modules()}
        self.further = [m for m in root.modules() if isinstance(m, FSDPModule) and m not in inside and m is not root]
        self._counter = counter
        self._inside = False
        self._marks: list[list[int]] = []
        self._scattered = False  # a backward pass or optimizer step inside a step has resharded
        self._lost = False  # an exception inside a step has resharded what the rest of the step needs
        self._opened: list[bool] = []
        self._outside = ExitStack()
        nested = [module for block in self.blocks for module in nested_groups(block)]
        for module in (root, *self.further, *nested, *self.blocks):
            take_hooks_off(module)
            count_collectives(module, counter)
            gather_beside_computing(module)
        for module in (*self.further, *nested):
            keep_casts(module)
        for block in self.blocks:
            join_groups(block)
            begin_backward_once(block)
        root.zero_grad = functools.partial(self._zero_grad, root.zero_grad)  # type: ignore[method-assign]
        for module in (root, *root.children()):
            if module not in inside and any(True for _ in module.parameters()):
                module.register_forward_pre_hook(self._before_call, prepend=True)
                module.register_forward_hook(self._after_call, always_call=True)
        for module in root.modules():
            if module not in inside and any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._before_own_call, prepend=True)

    def _zero_grad(self, zero_grad: Callable[[bool], None], set_to_none: bool = True) -> None:
        """The root's ``zero_grad``: inside a step gathered parameters are registered, and the shards have gradients."""
        zero_grad(set_to_none)
        for module in self._kept:
            clear_shard_gradients(module, set_to_none)

    # -- one step ----------------------------------------------------------------------------------------------------

    def call(self, fn: Callable[..., Any], *args: Any, backward_follows: bool, **kwargs: Any) -> Any:
        """Run ``fn(*args, **kwargs)`` with the root group and the further groups gathered.

        Args:
            fn: what to run, for example ``module.training_step``.
            args: its positional arguments.
            backward_follows: keep them gathered for a backward pass through the result.
            kwargs: its keyword arguments.
        """
        with self.cleaned_on_error():
            self._enter()
            output = fn(*args, **kwargs)
            return self._leave(output, keep=backward_follows and torch.is_grad_enabled())

    def _enter(self) -> None:
        self._lost = self._scattered = False
        self.prefetch.begin()
        self.unused.begin()
        # A forward pass without backward leaves groups gathered; an optimizer step would make them stale.
        self._reshard()
        with no_inference():
            fsdp_state(self.root)._pre_forward(self.root, (), {})
            for module in self.further:
                fsdp_module(module).unshard()
        for kept in self._kept:
            follow_shards(kept)
        self._trained = [p for m in self._kept for p in gathered_params(m) if p.sharded_param.requires_grad]
        self._marks = [versions(m) for m in self._kept]
        self._inside = True

    def _leave(self, output: Any, *, keep: bool) -> Any:
        self._inside = False
        self._write_back()
        output = fsdp_state(self.root)._post_forward(self.root, (), output)
        if not keep:
            self.reset()
        return output

    def _write_back(self) -> None:
        """Keep what a step has written to parameters in place: it wrote to gathered copies."""
        for module, before in zip(self._kept, self._marks, strict=True):
            if is_unsharded(module):
                write_back(module, before)
        self._marks = [versions(m) for m in self._kept]

    @property
    def _kept(self) -> tuple[nn.Module, ...]:
        """The groups that stay gathered during a step."""
        return (self.root, *self.further)

    @property
    def _groups(self) -> tuple[nn.Module, ...]:
        return (*self._kept, *self.blocks)

    # -- backward and optimizer inside a step (manual optimization) --------------------------------------------------

    def before_backward(self, loss: Tensor) -> None:
        """Tell FSDP2 of a backward pass that starts at ``loss`` inside a step.

        FSDP2 learns of a backward pass from hooks on what a step returns; here the step has not returned yet.
        """
        if self._inside:
            self._write_back()
            for module in self._kept:
                follow_shards(module)
            fsdp_state(self.root)._register_pre_backward_hook(loss)

    def after_backward(self) -> None:
        """Note that a backward pass inside a step has resharded; the next call of a module gathers again.

        Until then the shards are registered, whose gradients a step may look at, clip or clear.
        """
        self._scattered = self._inside
        self.prefetch.after_backward()

    def follow_steps(self, optimizers: Iterable[Any]) -> None:
        """Have :meth:`after_optimizer_step` called for steps past the Trainer too."""
        for optimizer in optimizers:
            if isinstance(optimizer, Optimizer):
                optimizer.register_step_post_hook(lambda *_: self.after_optimizer_step())

    def after_optimizer_step(self) -> None:
        """Reshard when an optimizer stepped inside a step, since the gathered parameters are the old ones."""
        if self._inside:
            self._reshard()
            self._scattered = True

    def gather_again(self) -> None:
        """Gather what autograd has resharded inside a step."""
        if self._inside and not all(is_unsharded(module) for module in self._kept if gathered_params(module)):
            self._gather()

    def _gather(self) -> None:
        self._scattered = False
        with no_inference():
            for module in self._kept:
                fsdp_module(module).unshard()
        # What is toggled off now may be on again when the step goes on; `before_backward` looks at the shards.
        for param in self._trained:
            param._unsharded_param.requires_grad_(True)

    # -- the root's place in a backward pass --------------------------------------------------------------------------

    def back_propagate(self, backward: Callable[[], object]) -> None:
        """Run a backward pass through what :meth:`call` returned, or inside it."""
        with self.reduced_after():
            backward()

    @contextmanager
    def reduced_after(self) -> Iterator[Callable[[], None]]:
        """Reduce the root and further groups after the backward pass inside, which may be several runs of autograd.

        Yields:
            A function to call before the last run: without other ranks to agree with, that run then reduces them.
        """
        try:
            self._hold_root(True)
            yield partial(self._hold_root, self.unused.agree is not None)
        finally:
            self._hold_root(False)
        self.unused.settle(self._kept, self.blocks, partial(finish_backward, self.root))

    def _hold_root(self, held: bool) -> None:
        for module in self._kept:
            fsdp_module(module).set_requires_gradient_sync(not held, recurse=False)
            fsdp_module(module).set_reshard_after_backward(not held, recurse=False)
        fsdp_module(self.root).set_is_last_backward(not held)

    # -- calls outside a step ----------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep the root group and the further groups gathered inside; nothing inside may be back-propagated after."""
        with self._counter.paused(), self.cleaned_on_error():
            if self._inside:
                yield
            else:
                self._enter()
                yield
                self._leave(None, keep=False)

    def _before_call(self, _module: nn.Module, _args: Any) -> None:
        """Forward pre-hook of the root and its children: gather around a call made outside a step."""
        if in_backward():
            self._opened.append(False)  # recomputation in a checkpoint of the user's, with parameters as they are
            return
        if self._lost:
            self._enter()
        opens = not self._inside
        if opens:
            self._outside.enter_context(self._counter.paused())
            self._enter()
        self._opened.append(opens)

    def _before_own_call(self, _module: nn.Module, _args: Any) -> None:
        """Forward pre-hook of modules with parameters outside blocks."""
        if self._scattered and self._inside and not in_backward():
            self._gather()

    def _after_call(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if self._opened and self._opened.pop():
            self._outside.close()
            if output is None:  # it raised, or has nothing to be back-propagated
                self.prefetch.forget()
                self.reset()
                return None
            return self._leave(output, keep=torch.is_grad_enabled())
        return None

    # -- recovery ----------------------------------------------------------------------------------------------------

    @contextmanager
    def cleaned_on_error(self) -> Iterator[None]:
        """Reshard everything and forget the pass when an exception leaves the context."""
        inside = self._inside
        try:
            yield
        except BaseException:
            self.reset(failed=True)
            self._lost = inside
            raise

    def reset(self, *, failed: bool = False) -> None:
        """Reshard every group and forget a pass that will not be finished; with ``failed`` its gradients too."""
        self._inside = False
        self._opened.clear()
        self._outside.close()
        self._lost = False
        self._reshard()
        try:
            reset_pass(self.root)
        except RuntimeError as error:
            # It waits for what is under way with ranks that are lost. The error that tells why comes from the caller.
            if not (failed and is_communication_error(error)):
                raise
        if failed:
            self.prefetch.forget()
            for module in self._groups:
                drop_unreduced(module)
            _free_failed_graph()

    def _reshard(self) -> None:
        for module in self._groups:
            reshard(module)


def _free_failed_graph() -> None:
    """The engine keeps the graph of a backward pass that raised until the next one; let that be one of nothing."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), requires_grad=True).backward()
