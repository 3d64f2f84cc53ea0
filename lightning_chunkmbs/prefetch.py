"""Gathering ahead: the next blocks are gathered while one computes, in forward and in backward.

[Note: what comes next]
FSDP2 gathers ahead what it is told to, when a call has gathered its own block and before that block computes. Told once
for all, it would gather in definition order; what runs is known better. In forward it is what the last pass ran. In
backward it is the calls of this pass, last to first, across runs of autograd: what is gathered ahead in one stays for
the next. The ranks call the same blocks in the same order, so they gather ahead the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .fsdp2 import fsdp_module
from .trees import leaves


class Prefetch:
    """Tells FSDP2 which blocks to gather ahead.

    Args:
        blocks: blocks by name, in definition order.
        ahead: how many blocks are gathered ahead.
    """

    def __init__(self, blocks: dict[str, nn.Module], ahead: int) -> None:
        self._ahead = ahead
        self._blocks = blocks
        one_stack = len({name.rpartition(".")[0] for name in blocks}) == 1
        order: list[nn.Module | None] = [*blocks.values()] if one_stack else []
        # What the last pass called, without and with gradients. Before the first, blocks of one stack are in order.
        self._last = {False: order, True: order}
        self._called: list[nn.Module | None] = []  # None: a backward pass, which ends what is gathered ahead
        self._as_before = True
        self._grad = False
        self._waiting: list[nn.Module] = []  # for backward, the one that comes first at the end

    def begin(self) -> None:
        """Begin a pass."""
        if self._called:
            self._last[self._grad] = self._called
        self._called, self._waiting = [], []
        self._as_before = True
        self._grad = torch.is_grad_enabled()

    def after_backward(self) -> None:
        """Note a backward pass inside a pass: FSDP2 drops what is gathered ahead."""
        self._waiting = []
        self._called.append(None)

    def forget(self) -> None:
        """Forget a pass that was broken off, perhaps not in the same place on all ranks."""
        self._called, self._waiting = [], []

    def expect_backward(self, names: Iterable[str]) -> None:
        """Say in which order blocks are back-propagated, where it is not that of autograd."""
        self._waiting = [self._blocks[name] for name in names][::-1]

    def before_forward(self, block: nn.Module) -> None:
        """Called before FSDP2's pre-forward: say what to gather ahead."""
        last, i = self._last[self._grad], len(self._called)
        self._called.append(block)
        self._as_before = self._as_before and i < len(last) and last[i] is block
        targets = self._next(block, last[i + 1 :]) if self._as_before else []
        fsdp_module(block).set_modules_to_forward_prefetch([fsdp_module(m) for m in targets])

    def before_backward(self, block: nn.Module, output: Any) -> None:
        """Called with what the call of a block returns: say, once its gradient comes, what to gather ahead."""
        tensors = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if tensors:
            self._waiting.append(block)
        told = False

        def tell(_grad: Tensor) -> None:
            nonlocal told
            if not told:
                told = True
                self._tell_backward(block)

        for tensor in tensors:
            tensor.register_hook(tell)  # comes before FSDP2's own hook, which gathers

    def _tell_backward(self, block: nn.Module) -> None:
        while self._waiting and self._waiting.pop() is not block:
            pass
        targets = self._next(block, self._waiting[::-1])
        # FSDP2 takes an empty list for its own idea of what comes next; the block itself is gathered already.
        fsdp_module(block).set_modules_to_backward_prefetch([fsdp_module(m) for m in targets or [block]])

    def _next(self, block: nn.Module, following: Sequence[nn.Module | None]) -> list[nn.Module]:
        """Return the first of the blocks that follow, each once."""
        near = itertools.takewhile(lambda m: m is not None, following[: self._ahead])
        return [m for m in dict.fromkeys(near) if m is not None and m is not block]
