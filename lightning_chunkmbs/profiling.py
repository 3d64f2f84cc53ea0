"""Names that a profiler's trace shows for what this package runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function


def chunk_range(block: str, i: int, n: int, *, again: bool) -> AbstractContextManager[Any]:
    """Return a context that a running profiler shows as chunk ``i`` (from 0) of the ``n`` of a block call.

    Args:
        block: the block's name.
        i: which chunk.
        n: of how many.
        again: whether it is recomputed.
    """
    # A range costs 12 µs also when nobody records it, asking 0.1.
    if not torch.autograd._profiler_enabled():
        return nullcontext()
    return record_function(f"ChunkMBS::block ({block}) chunk {i + 1}/{n}" + (", recomputed" if again else ""))
