"""Process groups, made once in a process: one run after the other on the same ranks uses the same groups."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")

# A group costs threads and connections until the process ends: nothing tells when the last mesh of it has gone.
_made: dict[Hashable, Any] = {}
_world: list[Any] = []


def once(key: Hashable, make: Callable[[], _T]) -> _T:
    """Return what ``make()`` returned for ``key``, anew only after the group of all ranks was made anew.

    All ranks that are in the group must call this in the same order.
    """
    if not _world or _world[0] is not dist.group.WORLD:
        _made.clear()
        _world[:] = [dist.group.WORLD]
    if key not in _made:
        _made[key] = make()
    made: _T = _made[key]
    return made
