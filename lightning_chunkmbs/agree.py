"""Agreement between ranks, on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from .process_groups import once

# Agrees with the other ranks on numbers: takes this rank's, returns the least of all for each.
Agree = Callable[[list[int]], list[int]]


def make_agree(ranks: Sequence[int], timeout: timedelta | None = None) -> Agree:
    """Return a function that agrees between ``ranks``, on the host; each of them must call this."""
    if len(ranks) == 1:
        return list
    # Several such groups exist beside tensor parallelism; each rank makes its own.
    make = partial(dist.new_group, list(ranks), timeout=timeout, backend="gloo", use_local_synchronization=True)
    group = once(("agree", tuple(ranks), timeout), make)

    def agree(numbers: list[int]) -> list[int]:
        values = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(values, op=dist.ReduceOp.MIN, group=group)
        least: list[int] = values.tolist()
        return least

    return agree
