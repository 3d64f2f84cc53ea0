"""Bytes that a step is made of: of groups, of calls of blocks, outside blocks; and what they come to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .dtypes import Dtypes

__all__: list[str] = []


@dataclass(frozen=True, kw_only=True)
class GroupBytes:
    """Bytes of the parameters that are gathered together.

    Attributes:
        shards: a rank's part of the parameters.
        shard_gradients: a rank's part of their gradients.
        gathered: all of them, as they are computed with.
        gradients: their gradients before reduction.
        buffer: what a gather brings.
        reduced: what a reduction is made from.
    """

    shards: int = 0
    shard_gradients: int = 0
    gathered: int = 0
    gradients: int = 0
    buffer: int = 0
    reduced: int = 0


def group_bytes(parameters: Sequence[Tensor], ranks: int, dtypes: Dtypes) -> GroupBytes:
    """Return the bytes of parameters that are sharded over ``ranks`` along their first dimension."""
    total = dict.fromkeys(GroupBytes.__dataclass_fields__, 0)
    for p in parameters:
        kept, computed = _dtype(p, dtypes.shards), _dtype(p, dtypes.computed)
        part = p.numel() if p.ndim == 0 else -(-p.shape[0] // ranks) * (p.numel() // max(1, p.shape[0]))
        whole = part if p.ndim == 0 else part * ranks  # padded: each rank sends as much
        total["shards"] += part * kept.itemsize
        total["gathered"] += p.numel() * computed.itemsize if p.ndim else 0
        total["buffer"] += whole * computed.itemsize if p.ndim else 0
        if p.requires_grad:
            added_up = torch.promote_types(computed, torch.float32)
            total["shard_gradients"] += part * kept.itemsize
            total["gradients"] += p.numel() * added_up.itemsize
            total["reduced"] += whole * (dtypes.reduce or added_up).itemsize
    return GroupBytes(**total)


def _dtype(p: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and p.is_floating_point() else p.dtype


@dataclass(frozen=True, kw_only=True)
class BlockBytes:
    """Bytes that one call of a block needs.

    Attributes:
        group: its parameters.
        entry: its entry activation, of a whole micro-batch.
        exit: what it returns, for a whole micro-batch.
        chunks: into how many chunks a micro-batch is cut.
        chunk_entry: the part of ``entry`` of one chunk, the largest.
        chunk_exit: the part of ``exit`` of one chunk, the largest.
        kept: results of one chunk that are kept beside its entry activation and not computed again.
        forward: what one chunk needs in forward, what it returns and ``kept`` included.
        backward: what one chunk needs in recomputation and backward, beside ``kept``.
        offloaded: whether entry activations and ``kept`` wait on the host.
        held: what is alive outside blocks when it is called: masks, rotary tables, what the embedding saves.
        sides: gradients of tensors that earlier blocks were given too, for a whole micro-batch.
        trained: whether it is back-propagated.
    """

    group: GroupBytes
    entry: int
    exit: int
    chunks: int
    chunk_entry: int
    chunk_exit: int
    forward: int
    backward: int
    offloaded: bool
    kept: tuple[int, ...] = ()
    held: int = 0
    sides: int = 0
    trained: bool = True

    def exits(self) -> Iterator[int]:
        """What each chunk of one micro-batch returns."""
        for i in range(self.chunks):
            yield min(self.chunk_exit, self.exit - i * self.chunk_exit)

    def waiting(self) -> Iterator[int]:
        """What waits for backward of each chunk of one micro-batch, tensor by tensor."""
        left = self.entry if self.trained else 0
        for _ in range(self.chunks if self.trained else 0):
            part = min(left, self.chunk_entry)
            left -= part
            yield part
            for nbytes in self.kept:
                yield nbytes * part // self.chunk_entry if self.chunk_entry else nbytes


@dataclass(frozen=True, kw_only=True)
class Outside:
    """Bytes of one micro-batch's step outside blocks.

    Attributes:
        held: alive while blocks are back-propagated: masks, rotary tables, what the embedding saves.
        forward: most that is alive beside what is held when the last block is called, until the loss is there.
        backward: most that is alive beside that until the loss is back-propagated to what the last block returned.
        again: the same for a second micro-batch, when these gradients are there.
        gradients: gradients of parameters outside blocks that this has made.
        front: most that is alive beside all gradients of parameters while what comes before blocks is back-propagated.
        flops: of the forward pass.
    """

    held: int
    forward: int
    backward: int
    again: int
    gradients: int
    front: int
    flops: int


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes of a rank.

    Attributes:
        parameters: shards of parameters.
        gradients: shards of gradients.
        optimizer: the optimizer's state.
        optimizer_step: most that the optimizer needs beside while it steps.
        block: the largest gathered block.
        block_gradients: its gradients before reduction.
        chunk: activations of one chunk, the most of all blocks.
        in_flight: hidden states of all micro-batches that are on the device at once.
        host: what waits on the host.
        peaks: bytes on the device at each of the moments of [Note: moments].
    """

    parameters: int
    gradients: int
    optimizer: int
    optimizer_step: int
    block: int
    block_gradients: int
    chunk: int
    in_flight: int
    host: int
    peaks: dict[str, int]

    @property
    def peak(self) -> int:
        """Most bytes on the device."""
        return max(self.peaks.values())
