"""Bytes of a rank at each moment of an optimizer step, from what parameters, chunks and the code outside blocks need.

[Note: moments]
``forward``: a block runs its last chunk; what goes into it and what comes out exist for every micro-batch in flight.
``outside``: what follows the last block runs for one micro-batch, while all others hold what it returned.
``backward``: a block is recomputed and back-propagated; the gradient of what it returned exists for every micro-batch.
``reduce``: a group's gradients are reduced. ``optimizer``: the optimizer steps.

FSDP2 keeps the buffer of the last gather in forward until the next one, gathers one group ahead, and keeps the
buffer from which the last gradients were reduced until the next ones are.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        forward: what one chunk needs in forward, what it returns included.
        backward: what one chunk needs in recomputation and backward.
        offloaded: whether entry activations wait on the host.
    """

    group: GroupBytes
    entry: int
    exit: int
    chunks: int
    forward: int
    backward: int
    offloaded: bool


@dataclass(frozen=True, kw_only=True)
class Outside:
    """Bytes that one micro-batch needs outside blocks; see :class:`~lightning_chunkmbs.fake_step.OutsideCost`."""

    batch: int
    held: int
    forward: int
    backward: int
    gradients: int
    front: int


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


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """A step whose bytes are wanted.

    Args:
        blocks: the calls of blocks, in order.
        kept: the groups that stay gathered during a step, the root's among them.
        outside: one micro-batch outside blocks.
        micro_batches: how many run side by side.
        optimizer: bytes of the optimizer's state.
        optimizer_step: bytes that it needs beside while it steps.
        idle_shards: shards of blocks that the step does not call.
        ahead: how many blocks are gathered ahead.
        streams: hidden states wait on the host between blocks.
        host_limit: most bytes of activations on the host; None: no limit.
        cpu_offload: shards, their gradients and the optimizer's state are on the host.
    """

    blocks: Sequence[BlockBytes]
    kept: GroupBytes
    outside: Outside
    micro_batches: int
    optimizer: int
    optimizer_step: int
    idle_shards: int = 0
    ahead: int = 1
    streams: bool = False
    host_limit: int | None = None
    cpu_offload: bool = False

    def bytes(self) -> StepBytes:
        """Return the bytes of this step."""
        peaks = {
            "forward": max(self._forward(i) for i in range(len(self.blocks))),
            "outside": self._outside(),
            "backward": max(self._backward(i) for i in range(len(self.blocks))),
            "reduce": max(self._reduce(i) for i in range(-1, len(self.blocks))),
            "optimizer": self._always + self._sharded(self._all_gradients + self.optimizer_step),
        }
        largest = max((b.group for b in self.blocks), key=lambda g: g.gathered + g.gradients)
        moved = self.cpu_offload * (self._shards + self.optimizer + self._all_gradients)
        return StepBytes(
            parameters=self._shards,
            gradients=self._all_gradients,
            optimizer=self.optimizer,
            optimizer_step=self.optimizer_step,
            block=largest.gathered,
            block_gradients=largest.gradients,
            chunk=max(max(b.forward, b.backward) for b in self.blocks),
            in_flight=max(self._flying_forward(b) for b in self.blocks),
            host=self._waiting - self._overflow + moved,
            peaks=peaks,
        )

    # -- what is there all the time ----------------------------------------------------------------------------------

    def _sharded(self, nbytes: int) -> int:
        return 0 if self.cpu_offload else nbytes

    @property
    def _shards(self) -> int:
        return self.idle_shards + self.kept.shards + sum({id(b.group): b.group.shards for b in self.blocks}.values())

    @property
    def _all_gradients(self) -> int:
        return self.kept.shard_gradients + self._reduced_after(-1)

    @property
    def _always(self) -> int:
        batches = self.micro_batches * self.outside.batch
        return self._sharded(self._shards + self.optimizer) + batches + self._overflow

    def _reduced_after(self, i: int) -> int:
        """Shards of gradients of the blocks that come after block ``i``."""
        return sum({id(b.group): b.group.shard_gradients for b in self.blocks[i + 1 :]}.values())

    @property
    def _waiting(self) -> int:
        """Bytes that wait for backward."""
        entries = self.micro_batches * sum(b.entry for b in self.blocks if b.offloaded)
        if self.streams:
            # The output of the last block and its gradient; of a micro-batch alone it goes before its gradient comes.
            last = 1 if self.micro_batches == 1 else 2 * self.micro_batches
            return entries + last * max(b.exit for b in self.blocks)
        # The chunk that is recomputed first stays on the device.
        first = self.blocks[-1]
        return max(0, entries - (first.entry // first.chunks if first.offloaded else 0))

    @property
    def _overflow(self) -> int:
        """Bytes that find no room on the host."""
        return 0 if self.host_limit is None else max(0, self._waiting - self.host_limit)

    # -- moments -----------------------------------------------------------------------------------------------------

    @property
    def _side(self) -> int:
        return self.kept.gathered + self.micro_batches * self.outside.held

    def _staying(self, i: int) -> int:
        """Entry activations of blocks up to block ``i`` that are not offloaded."""
        return self.micro_batches * sum(b.entry for b in self.blocks[: i + 1] if not b.offloaded)

    def _flying_forward(self, block: BlockBytes) -> int:
        if self.streams:
            return self.micro_batches * block.entry + 2 * block.exit // block.chunks
        return self.micro_batches * (block.entry * block.offloaded + block.exit)

    def _flying_backward(self, block: BlockBytes) -> int:
        chunk = 2 * block.entry // block.chunks  # what is recomputed from, and the next one
        if self.streams:
            return self.micro_batches * block.entry + 2 * chunk
        return self.micro_batches * block.exit + (block.exit if block.chunks > 1 else 0) + chunk

    def _forward(self, i: int) -> int:
        block = self.blocks[i]
        ahead = sum(b.group.buffer for b in self.blocks[i + 1 : i + 1 + self.ahead])
        chunk = max(0, block.forward - block.exit // block.chunks)
        old = self._all_gradients if self.micro_batches == 1 else 0  # cleared when the window begins, or after forward
        group = block.group.gathered + block.group.buffer + ahead
        return (
            self._always
            + self._sharded(old)
            + self._side
            + group
            + self._flying_forward(block)
            + self._staying(i)
            + chunk
        )

    def _outside(self) -> int:
        last, n = self.blocks[-1], self.micro_batches
        staying = self._staying(len(self.blocks) - 1)
        common = self._always + self._side + last.exit * (1 if self.streams else n) + staying
        old = self._sharded(self._all_gradients) if n == 1 else 0
        forward = common + old + self.outside.forward + last.group.buffer
        return max(forward, common + self.outside.gradients + self.outside.backward)

    def _backward(self, i: int) -> int:
        block = self.blocks[i]
        ahead = sum(b.group.buffer for b in self.blocks[max(0, i - self.ahead) : i])
        before = self.blocks[i + 1].group.reduced if i + 1 < len(self.blocks) else 0
        group = block.group.gathered + block.group.gradients + ahead + before
        flying = self._flying_backward(block) + self._staying(i)
        made = self._sharded(self._reduced_after(i)) + self.outside.gradients
        return self._always + self._side + made + group + flying + block.backward

    def _reduce(self, i: int) -> int:
        """The group of block ``i``, or for -1 the root's."""
        made = self._sharded(self._reduced_after(i))
        if i >= 0:
            group, rest = (
                self.blocks[i].group,
                self._side + self.outside.gradients + self._flying_backward(self.blocks[i]),
            )
            ahead = sum(b.group.buffer for b in self.blocks[max(0, i - self.ahead) : i])
            return self._always + made + rest + ahead + group.gradients + group.reduced
        first = self.blocks[0].group.reduced
        embedding = self._side + self.kept.gradients + self.outside.front + self.micro_batches * self.blocks[0].entry
        return (
            self._always + made + max(embedding + first, self.kept.gradients + self.kept.reduced + self.kept.gathered)
        )
