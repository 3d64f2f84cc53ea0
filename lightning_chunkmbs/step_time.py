"""Time of an optimizer step by arithmetic: stock gradient accumulation, and the same samples under ChunkMBS.

[Note: how time adds up]
What gathers and reduces is the link of a rank; what computes is the device. One group is gathered ahead: while a block
computes, the link gathers the one that follows and, in backward, reduces the one before, and the longer of both counts.
Nothing computes beside the first gather and the last reduction of a pass. Without ``overlap`` (gloo on a CPU) FSDP2
waits for every collective; there ChunkMBS gathers beside computation all the same, and waits for reductions. What such
a gather takes of the processors (gloo copies) is lost to computation: its ``gather_share``. Stock
gathers each block for forward and for backward of every micro-batch and reduces it in every micro-batch; ChunkMBS does
each once per pass. Backward computes three forwards: recomputation, gradients of inputs and gradients of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BlockWork", "StepTime", "predict"]

BACKWARD = 3  # forwards that recomputation and backward cost


@dataclass(frozen=True, kw_only=True)
class BlockWork:
    """What a block does in a step.

    Attributes:
        forward_seconds: forward pass of one micro-batch on one rank.
        gathered_bytes: bytes of all its parameters in the dtype in which they are gathered.
        reduced_bytes: bytes of all its gradients in the dtype in which they are reduced.
        offloaded_bytes: entry activations of one micro-batch that go to the host and come back.
    """

    forward_seconds: float
    gathered_bytes: float
    reduced_bytes: float
    offloaded_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted seconds of one optimizer step.

    Attributes:
        stock: stock gradient accumulation.
        chunkmbs: the same samples under ChunkMBS.
        compute: both would take this if communication were free.
        stock_communication: seconds the link is busy with stock accumulation.
        chunkmbs_communication: the same under ChunkMBS.
    """

    stock: float
    chunkmbs: float
    compute: float
    stock_communication: float
    chunkmbs_communication: float

    @property
    def ratio(self) -> float:
        """Time of ChunkMBS over that of stock accumulation."""
        return self.chunkmbs / self.stock if self.stock else 1.0

    @property
    def gain(self) -> float:
        """By how much more samples a second pass than with stock accumulation: 0.05 is 5 %."""
        return 1 / self.ratio - 1 if self.ratio else 0.0


def predict(
    blocks: Sequence[BlockWork],
    *,
    micro_batches: int,
    ranks: int,
    link_bytes_per_second: float,
    kept_gathered_bytes: float = 0.0,
    kept_reduced_bytes: float = 0.0,
    outside_seconds: float = 0.0,
    latency_seconds: float = 0.0,
    pcie_bytes_per_second: float | None = None,
    passes: int = 1,
    overlap: bool = True,
    gather_share: float = 0.0,
) -> StepTime:
    """Predict the time of an optimizer step.

    Args:
        blocks: the calls of blocks in one micro-batch, in order.
        micro_batches: how many stock accumulates; under ChunkMBS they run side by side, or are chunks of one batch.
        ranks: over how many each group is sharded.
        link_bytes_per_second: bytes that a rank can send (and receive) in a second during a collective.
        kept_gathered_bytes: bytes of the parameters outside blocks, which are gathered once per step of the module.
        kept_reduced_bytes: bytes of their gradients.
        outside_seconds: forward pass of one micro-batch outside blocks.
        latency_seconds: what a collective costs whatever its size.
        pcie_bytes_per_second: bytes copied between device and host in a second, each way; None: no time.
        passes: passes that ChunkMBS takes (more than one with ``max_lockstep``).
        overlap: all communication goes on beside computation; see [Note: how time adds up].
        gather_share: share of a gather's time that it takes from computation beside it, from 0 to 1.

    Returns:
        The step's time in seconds. A collective of a group with B bytes takes ``latency + B * (ranks - 1) / ranks /
        link_bytes_per_second``.

    Raises:
        ValueError: a number is not positive.
    """
    _check(micro_batches=micro_batches, ranks=ranks, link_bytes_per_second=link_bytes_per_second, passes=passes)
    if pcie_bytes_per_second is not None:
        _check(pcie_bytes_per_second=pcie_bytes_per_second)

    def collective(nbytes: float) -> float:
        return (latency_seconds + nbytes * (ranks - 1) / ranks / link_bytes_per_second) if nbytes and ranks > 1 else 0.0

    def one_pass(together: float, pcie: float | None, *, gathers_ahead: bool) -> tuple[float, float]:
        """Seconds of a pass over ``together`` micro-batches, and those in which the link is busy."""
        computes = [block.forward_seconds * together for block in blocks]
        copies = [block.offloaded_bytes * together / pcie if pcie else 0.0 for block in blocks]
        gathers = [collective(block.gathered_bytes) for block in blocks]
        reduces = [collective(block.reduced_bytes) for block in blocks]
        forward = _passed(computes, copies, gathers, [0.0] * len(blocks), gathers_ahead, overlap, gather_share)
        again = [BACKWARD * c for c in computes[::-1]]
        backward = _passed(again, copies[::-1], gathers[::-1], reduces[::-1], gathers_ahead, overlap, gather_share)
        # Nothing computes beside the gather of the root group, nor beside its reduction.
        kept = collective(kept_gathered_bytes) + collective(kept_reduced_bytes)
        outside = BACKWARD * outside_seconds * together
        return kept + outside + forward + backward, kept + 2 * sum(gathers) + sum(reduces)

    stock, stock_busy = one_pass(1, None, gathers_ahead=overlap)
    ours, our_busy = one_pass(micro_batches / passes, pcie_bytes_per_second, gathers_ahead=True)
    in_blocks = sum(block.forward_seconds for block in blocks) * (1 + BACKWARD)
    return StepTime(
        stock=micro_batches * stock,
        chunkmbs=passes * ours,
        compute=micro_batches * (in_blocks + BACKWARD * outside_seconds),
        stock_communication=micro_batches * stock_busy,
        chunkmbs_communication=passes * our_busy,
    )


def _passed(
    computes: list[float],
    copies: list[float],
    gathers: list[float],
    reduces: list[float],
    gathers_ahead: bool,
    reduces_beside: bool,
    gather_share: float,
) -> float:
    """Return the seconds of blocks one after the other, each given by its own seconds of each kind."""
    if not gathers_ahead:
        return sum(computes) + sum(copies) + sum(gathers) + sum(reduces)
    following, before = [*gathers[1:], 0.0], [0.0, *reduces[:-1]]
    beside = following if not reduces_beside else [g + r for g, r in zip(following, before, strict=True)]
    exposed = sum(gathers[:1]) + sum(reduces[-1:] if reduces_beside else reduces)
    slowed = [compute + gather_share * gather for compute, gather in zip(computes, following, strict=True)]
    return exposed + sum(map(max, slowed, copies, beside))


def _check(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, but got {value!r}.")
