"""Ranks that share layers by tensor parallelism share their data too; other data would be mixed, or hang."""

from __future__ import annotations

import zlib
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from .agree import Agree
from .trees import leaves


class SameBatch:
    """Compares batches between the ranks that share layers.

    Args:
        agree: agrees over these ranks on the least of numbers.
    """

    def __init__(self, agree: Agree) -> None:
        self._agree = agree
        self._seen: set[Hashable] = set()

    def check(self, batch: Any, loader: Hashable) -> None:
        """Refuse a batch of other shapes (so perhaps other chunks) than the other ranks'.

        The first one of each ``loader`` (one of each epoch) is compared by its values.

        Raises:
            ValueError: the batches differ; raised on every rank.
        """
        values = loader not in self._seen  # afterwards not: each look at values waits for the device
        self._seen.add(loader)
        mark = zlib.crc32(b"".join(_described(leaf, values) for leaf in leaves(batch)))
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
