"""torch.compile of what a block does for one chunk.

The loop over chunks, recomputation and FSDP2's hooks stay outside: they would break the graph or be compiled anew for
each number of chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

BACKEND = "inductor"


class CompiledForwards:
    """The compiled forwards of a model's blocks: one for each class, since blocks of a class share their graphs."""

    def __init__(self) -> None:
        self._by_class: dict[type, Callable[..., Any]] = {}

    def of(self, name: str, block: nn.Module) -> Callable[..., Any]:
        """Return the compiled forward of a block that has not been changed yet.

        Raises:
            TypeError: the block's forward is not that of its class.
        """
        if "forward" in block.__dict__:
            raise TypeError(
                f"compile_blocks compiles the forward of a block's class, and {name} has a forward of its own. Delete "
                f"what patches it, or write compile_blocks: false."
            )
        cls = type(block)
        if cls not in self._by_class:
            self._by_class[cls] = torch.compile(cls.forward, backend=BACKEND)
        return partial(self._by_class[cls], block)
