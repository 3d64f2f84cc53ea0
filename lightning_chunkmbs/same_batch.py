"""Ranks that share layers by tensor parallelism share their data too; other data would be mixed, or hang."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from .groups import Agree
from .trees import tree_leaves


class SameBatch:
    """Compares batches between the ranks that share layers.

    Args:
        agree: agrees over these ranks on the least of numbers.
    """

    def __init__(self, agree: Agree) -> None:
        self._agree = agree
        self._first = True

    def begin_epoch(self) -> None:
        """Look at the values of the next batch again: samplers that are seeded for each epoch part there."""
        self._first = True

    def check(self, batch: Any) -> None:
        """Refuse a batch of other shapes (so perhaps other chunks) than the other ranks'; an epoch's first by values.

        Raises:
            ValueError: the batches differ; raised on every rank.
        """
        values, self._first = self._first, False  # afterwards not: each look at values waits for the device
        mark = zlib.crc32(b"".join(_described(leaf, values) for _, leaf in tree_leaves(batch)))
        least, greatest = self._agree([mark, -mark])
        if least != -greatest:
            raise ValueError(
                "The ranks of a tensor-parallel group work on the same batch, and theirs differ in this step. Leave "
                "the sampler to Lightning, or give it the ranks of self.device_mesh['data_parallel']: "
                "DistributedSampler(data, **trainer.strategy.distributed_sampler_kwargs)."
            )


def _described(leaf: Any, values: bool) -> bytes:
    if not isinstance(leaf, Tensor):
        return repr(leaf).encode() if isinstance(leaf, (bool, int, float, str)) else b""
    content = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if values else b""
    return repr((tuple(leaf.shape), leaf.dtype)).encode() + content
