"""Parameters that the steps of some ranks do not use.

[Note: who has a gradient]
FSDP2 reduces parameters that have a gradient, and the ranks must reduce the same: else gradients of different
parameters are added up, or the ranks wait for each other. Experts or the heads of several tasks may be used on one rank
and not on another. So when the backward pass of a block call is over, the block's parameters without a gradient get
zeros; the node that does so is the last before FSDP2's, behind all chunks. When all of a backward pass is over, and
before parameters outside blocks are reduced, the ranks agree on what none of them has used. That gets no gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import Function

from .agree import Agree
from .fsdp2 import fill_missing, has_gradient, nested_groups, trained_params


class Unused:
    """Gives zeros for gradients to what only other ranks use.

    Attributes:
        agree: agrees with the other ranks; None where there are none, or not yet.
    """

    def __init__(self) -> None:
        self.agree: Agree | None = None
        self._open: Counter[nn.Module] = Counter()  # calls of blocks whose backward pass is not over
        self._used: set[Any] = set()  # FSDP2's parameters of blocks that had a gradient
        self._zeros: set[Any] = set()  # those whose gradient is nothing but zeros that they were given

    def begin(self) -> None:
        """Begin a pass."""
        self._open.clear()
        self._used.clear()
        self._zeros.clear()

    def completed(self, block: nn.Module, tensors: Sequence[Tensor], *, idle: bool = False) -> list[Tensor]:
        """Return the ``tensors`` that enter a block's chunks, tied to a node that completes the block's gradients.

        An ``idle`` call is back-propagated by itself and gives all parameters zeros, which are no use of them.
        """
        result = list(tensors)
        wanting = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
        if self.agree is None or not wanting:
            return result
        self._open[block] += 1
        tied = _Complete.apply(partial(self._complete, block, idle), *(tensors[i] for i in wanting))
        for i, tensor in zip(wanting, tied, strict=True):
            result[i] = tensor
        return result

    def _complete(self, block: nn.Module, idle: bool) -> None:
        self._open[block] -= 1
        params = trained_params(block)
        used = [] if idle else [param for param in params if has_gradient(param)]
        self._used.update(used)
        # Of several calls in one graph autograd gives the gradients to the last, and nothing is reduced before. (What
        # a nested group holds may be used by any of them.)
        if not idle and not used and self._open[block] > 0 and not nested_groups(block):
            return
        for param in set(params).difference(used):
            if param.sharded_param.grad is None:
                self._zeros.add(param)
            fill_missing(param)

    def settle(self, outside: Sequence[nn.Module], blocks: Sequence[nn.Module], reduce: Callable[[], None]) -> None:
        """End a backward pass; all ranks must call this.

        Args:
            outside: modules whose groups are reduced now, those that are not gathered among them.
            blocks: blocks, which have been reduced.
            reduce: reduces what is outside blocks.
        """
        own = [param for module in outside for param in trained_params(module)]
        inner = [param for block in blocks for param in trained_params(block)]
        missing = [not has_gradient(param) for param in own] + [param not in self._used for param in inner]
        by_all = missing if self.agree is None else self.agree([int(m) for m in missing])
        for param, missed_by_all in zip(own, by_all, strict=False):
            if not missed_by_all:
                fill_missing(param)
        reduce()
        for param, missed_by_all in zip(inner, by_all[len(own) :], strict=True):
            if missed_by_all and param in self._zeros:
                param.sharded_param.grad = None
        self.begin()


class _Complete(Function):
    # Not with setup_context: torch inspects its signature at each call, which takes as long as a small kernel.
    @staticmethod
    def forward(ctx: Any, complete: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.complete = complete
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.complete()
        return (None, *grads)
