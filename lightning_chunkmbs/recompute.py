"""One chunk's forward, and the same again in backward."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, noop_context_fn

from .block_buffers import BlockBuffers
from .recorders import taking_off

# Makes what a chunk's first run and its recomputation run under.
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
NOTHING: Contexts = noop_context_fn


class Run:
    """One chunk's forward, run again by recomputation in the state of its first run.

    Recomputation may come from another thread and after the step has ended. ``checkpoint`` brings back autocast and
    random numbers; contextvars, the default dtype and the training mode are brought back here.

    Args:
        forward: what to run, called with the chunk's tensors and whether it has been run before.
        buffers: the block's buffers.
        on_written: called with the names of buffers that the first run wrote.
    """

    def __init__(
        self,
        forward: Callable[[Sequence[Tensor], bool], Any],
        buffers: BlockBuffers,
        on_written: Callable[[list[str]], None],
    ) -> None:
        self._forward = forward
        self._buffers = buffers
        self._on_written = on_written
        self._written: list[str] = []
        self._training = buffers.block.training
        self._context: contextvars.Context | None = None
        self._dtype = torch.get_default_dtype()

    def __call__(self, *values: Tensor) -> Any:
        if self._context is None:
            self._context = contextvars.copy_context()
            marks = self._buffers.marks()
            output = self._forward(values, False)
            self._written = self._buffers.written(marks)
            if self._written and torch.is_grad_enabled():
                self._on_written(self._written)
            return output
        # What is recorded again is dropped: the model has used what it recorded in its first run.
        return self._context.copy().run(taking_off, lambda: self._again(values))[0]

    def _again(self, values: Sequence[Tensor]) -> Any:
        now = torch.get_default_dtype()
        if now != self._dtype:
            torch.set_default_dtype(self._dtype)
        block = self._buffers.block
        training = block.training
        try:
            if training != self._training:  # a step may toggle eval() and train() around its passes
                block.train(self._training)
            with self._buffers.kept(self._written) if self._written else nullcontext():
                return self._forward(values, True)
        finally:
            if torch.get_default_dtype() != now:
                torch.set_default_dtype(now)
            if training != self._training:
                block.train(training)

    def recomputed(self, values: Sequence[Tensor], contexts: Contexts = NOTHING) -> Any:
        """Run now, keep ``values`` alone, and run again in backward.

        Args:
            values: the chunk's tensors, flat: only positional tensors pass through the saved-tensor hooks.
            contexts: makes what the first run and recomputation run under.
        """
        # Casts cached by autocast would add up the chunks' gradients in the lower precision.
        torch.clear_autocast_cache()
        return checkpoint(self, *values, use_reentrant=False, context_fn=contexts)
