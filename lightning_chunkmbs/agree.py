"""Agreement between ranks, on the host."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Agrees with the other ranks on numbers: takes this rank's, returns the least of all for each.
Agree = Callable[[list[int]], list[int]]


def make_agree(mesh: DeviceMesh, timeout: timedelta | None = None) -> Agree:
    """Return a function that agrees over the ranks of ``mesh``, on the host; every rank must call this."""
    ranks = dist.get_process_group_ranks(mesh.get_group())
    # Several such groups exist beside tensor parallelism; each rank makes its own.
    group = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)

    def agree(numbers: list[int]) -> list[int]:
        values = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(values, op=dist.ReduceOp.MIN, group=group)
        least: list[int] = values.tolist()
        return least

    return agree
