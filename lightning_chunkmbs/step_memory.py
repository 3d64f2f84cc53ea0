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
from dataclasses import dataclass, field, replace

from .step_bytes import BlockBytes, GroupBytes, Outside, StepBytes

__all__: list[str] = []


def most(passes: Sequence[StepBytes]) -> StepBytes:
    """Return the bytes of a step of several passes: at each moment those of the pass that needs most."""
    peaks = {moment: max(p.peaks[moment] for p in passes) for moment in passes[0].peaks}
    in_flight, host = max(p.in_flight for p in passes), max(p.host for p in passes)
    return replace(passes[0], peaks=peaks, in_flight=in_flight, host=host)


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """A pass whose bytes are wanted.

    Args:
        blocks: the calls of blocks, in order.
        kept: the groups that stay gathered during a step, the root's among them.
        outside: one micro-batch outside blocks.
        batch: bytes of a micro-batch itself.
        micro_batches: how many run side by side.
        optimizer: bytes of the optimizer's state.
        optimizer_step: bytes that it needs beside while it steps.
        idle_shards: shards of blocks that the step does not call.
        ahead: how many blocks are gathered ahead.
        reshards: blocks are freed after forward and gathered again for backward.
        accumulates: the gradients of an earlier pass are there already.
        streams: hidden states wait on the host between blocks.
        host_limit: most bytes of activations on the host; None: no limit.
        host_least: activations of fewer bytes stay on the device.
        ahead_bytes: bytes that are brought back ahead; None: one chunk.
        cpu_offload: shards, their gradients and the optimizer's state are on the host.
    """

    blocks: Sequence[BlockBytes]
    kept: GroupBytes
    outside: Outside
    batch: int
    micro_batches: int
    optimizer: int
    optimizer_step: int
    idle_shards: int = 0
    ahead: int = 1
    reshards: bool = True
    accumulates: bool = False
    streams: bool = False
    host_limit: int | None = None
    host_least: int = 0
    ahead_bytes: int | None = None
    cpu_offload: bool = False
    _on_host: int = field(init=False, default=0)
    _on_device: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        on_host, on_device = self._placed()
        object.__setattr__(self, "_on_host", on_host)
        object.__setattr__(self, "_on_device", on_device)

    def bytes(self) -> StepBytes:
        """Return the bytes of this pass."""
        trained = [i for i, b in enumerate(self.blocks) if b.trained]
        peaks = {
            "forward": max(self._forward(i) for i in range(len(self.blocks))),
            "outside": self._outside(),
            "backward": max((self._backward(i) for i in trained), default=0),
            "reduce": max(self._reduce(i) for i in (-1, *trained)),
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
            host=self._on_host + moved,
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
        batches = self.micro_batches * self.batch
        return self._sharded(self._shards + self.optimizer) + batches

    def _reduced_after(self, i: int) -> int:
        """Shards of gradients of the blocks that come after block ``i``."""
        return sum({id(b.group): b.group.shard_gradients for b in self.blocks[i + 1 :]}.values())

    @property
    def _old(self) -> int:
        """Gradients that are there in forward."""
        # Those of the last step are cleared when the window begins, or after the forward pass of a micro-batch alone.
        there = self.accumulates or self.micro_batches == 1
        return self._sharded(self._all_gradients) if there else 0

    def _made(self, i: int) -> int:
        """Gradients that are there while block ``i`` is back-propagated."""
        return self._sharded(self._all_gradients if self.accumulates else self._reduced_after(i))

    def _moving(self, group: GroupBytes) -> int:
        """A group's shards on their way from the host to where they are gathered."""
        return group.shards if self.cpu_offload else 0

    # -- what waits for backward -------------------------------------------------------------------------------------

    def _placed(self) -> tuple[int, list[int]]:
        """Return the bytes that wait on the host, and those of each block's call that stay on the device."""
        on_host, on_device = 0, [0] * len(self.blocks)
        limit = float("inf") if self.host_limit is None else self.host_limit
        for i, block in enumerate(self.blocks):
            for nbytes in [*block.waiting()] * self.micro_batches:
                if block.offloaded and self.host_least <= nbytes <= limit - on_host:
                    on_host += nbytes
                else:
                    on_device[i] += nbytes
        if self.streams:
            # The output of the last block and its gradient; of a micro-batch alone it goes before its gradient comes.
            last = 1 if self.micro_batches == 1 else 2 * self.micro_batches
            for nbytes in [*max(self.blocks, key=lambda b: b.exit).exits()] * last:
                on_host += nbytes if on_host + nbytes <= limit else 0
        elif on_device[-1] == 0:
            on_host -= self.blocks[-1].chunk_entry  # the chunk that is recomputed first stays on the device
        return on_host, on_device

    def _staying(self, i: int) -> int:
        """What waits on the device for blocks up to block ``i``."""
        return sum(self._on_device[: i + 1])

    def _brought_back(self, i: int) -> int:
        """The entry activation that is recomputed from and those brought back ahead, and the results kept with it."""
        block = self.blocks[i]
        if not block.offloaded or block.chunk_entry < self.host_least:
            return 0
        ahead = block.chunk_entry if self.ahead_bytes is None else self.ahead_bytes
        waiting = self.micro_batches * sum(b.entry for b in self.blocks[: i + 1] if b.offloaded)
        return min(block.chunk_entry + ahead, waiting) + sum(block.kept)

    # -- moments -----------------------------------------------------------------------------------------------------

    def _side(self, i: int) -> int:
        """What is there outside blocks when block ``i`` is called."""
        return self.kept.gathered + self.micro_batches * self.blocks[i].held

    @property
    def _side_in_backward(self) -> int:
        return self.kept.gathered + self.micro_batches * self.outside.held

    def _still_gathered(self, i: int) -> int:
        """Blocks before block ``i`` that were not freed after their forward."""
        others = {id(b.group): b.group.gathered for b in self.blocks[:i] if b.group is not self._group(i)}
        return 0 if self.reshards else sum(others.values())

    def _group(self, i: int) -> GroupBytes | None:
        return self.blocks[i].group if i < len(self.blocks) else None

    def _ahead_in_backward(self, i: int) -> int:
        before = [b.group.buffer for b in self.blocks[:i] if b.trained]
        return sum(before[len(before) - self.ahead :] if self.ahead < len(before) else before) if self.reshards else 0

    def _flying_forward(self, block: BlockBytes) -> int:
        if self.streams:
            return self.micro_batches * block.entry + 2 * block.chunk_exit
        return self.micro_batches * (block.entry * block.offloaded + block.exit)

    def _flying_backward(self, i: int) -> int:
        block = self.blocks[i]
        sides = self.micro_batches * block.sides + self._brought_back(i)
        if self.streams:
            return self.micro_batches * block.entry + sides
        joined = block.exit if block.chunks > 1 else 0
        return self.micro_batches * block.exit + joined + sides

    def _forward(self, i: int) -> int:
        block = self.blocks[i]
        ahead = sum(b.group.buffer for b in self.blocks[i + 1 : i + 1 + self.ahead])
        kept = 0 if block.offloaded else sum(block.kept)  # stays, and counts there
        chunk = max(0, block.forward - block.chunk_exit - kept)
        group = block.group.gathered + block.group.buffer + ahead + self._moving(block.group) + self._still_gathered(i)
        flying = self._flying_forward(block) + self._staying(i)
        return self._always + self._old + self._side(i) + group + flying + chunk

    def _outside(self) -> int:
        last, n = self.blocks[-1], self.micro_batches
        hidden = last.exit * (1 if self.streams else n) + self._staying(len(self.blocks) - 1)
        common = self._always + self._side(-1) + hidden + self._still_gathered(len(self.blocks))
        others = self.outside.gradients if n > 1 else 0  # of the micro-batches before
        forward = common + self._old + others + self.outside.forward + last.group.buffer
        backward = max(self.outside.backward, self.outside.again if n > 1 else 0)
        made = self._old if self.accumulates else 0
        return max(forward, common + made + self.outside.gradients + backward)

    def _backward(self, i: int) -> int:
        block = self.blocks[i]
        before = self.blocks[i + 1].group.reduced if i + 1 < len(self.blocks) else 0
        group = block.group.gathered + block.group.gradients + self._moving(block.group)
        group += self._ahead_in_backward(i) + self._still_gathered(i) + before
        flying = self._flying_backward(i) + self._staying(i)
        made = self._made(i) + self.outside.gradients
        return self._always + self._side_in_backward + made + group + flying + block.backward

    def _reduce(self, i: int) -> int:
        """The group of block ``i``, or for -1 the root's."""
        if i < 0:
            return self._reduce_root()
        group, flying = self.blocks[i].group, self._flying_backward(i)
        rest = (
            self._side_in_backward
            + self.outside.gradients
            + flying
            + self._ahead_in_backward(i)
            + self._still_gathered(i)
        )
        return self._always + self._made(i) + rest + group.gradients + group.reduced + self._reduced_part(group)

    def _reduced_part(self, group: GroupBytes) -> int:
        """What a reduction returns, where it does not become the gradient."""
        return group.shard_gradients if self.accumulates or self.cpu_offload else 0

    def _reduce_root(self) -> int:
        first, kept = self.blocks[0], self.kept
        entries = self.micro_batches * first.entry + first.group.reduced
        embedding = self._side_in_backward + kept.gradients + self.outside.front + entries
        root = kept.gradients + kept.reduced + kept.gathered + self._reduced_part(kept)
        return self._always + self._made(-1) + max(embedding, root)
