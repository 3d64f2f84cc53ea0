"""torch.compile of what a block does for one chunk.

The loop over chunks, recomputation and FSDP2's hooks stay outside: they would break the graph or be compiled anew for
each number of chunks.

[Note: the same graph again]
A chunk's recomputation has to run the graph that its first run did, since what the two save is matched. torch takes the
first graph whose guards hold, and by default two may hold for one chunk: one made for its shape and one made later for
any. So all graphs are made for any shape, or, with DTensors, which torch cannot trace so, all for one shape.

Graphs also differ by a tensor's offset in its storage and by whether it is a view. A chunk is a view of its batch, and
recomputation gets it from the host. So parts of something larger are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .trees import map_tree

BACKEND = "inductor"


class CompiledForwards:
    """The compiled forwards of a model's blocks: one for each class, since blocks of a class share their graphs."""

    def __init__(self) -> None:
        self._by_class: dict[tuple[type, bool], Callable[..., Any]] = {}

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
        cls, dynamic = type(block), not any(isinstance(p, DTensor) for p in block.parameters())
        if (cls, dynamic) not in self._by_class:
            self._by_class[cls, dynamic] = torch.compile(cls.forward, backend=BACKEND, dynamic=dynamic)
        return partial(_call, self._by_class[cls, dynamic], block)


def _call(compiled: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a compiled forward with tensors of their own (see [Note: the same graph again])."""
    copies: list[tuple[Tensor, Tensor]] = []

    def own(value: Any, _path: str) -> Any:
        if not isinstance(value, Tensor) or not _is_part(value):
            return value
        copies.append((value, value.clone()))
        return copies[-1][1]

    args, kwargs = map_tree(own, (args, kwargs))
    output = compiled(block, *args, **kwargs)
    for given, copy in copies:
        if copy._version:  # the block wrote to it in place
            given.copy_(copy)
    return output


def _is_part(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a view that a copy would not make larger, as an expanded mask's would be."""
    return (tensor._is_view() or tensor.storage_offset() > 0) and 0 not in tensor.stride()
