"""Device bytes of a step: activations alive at its peak, counted storage by storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_chunkmbs import ActivationOffloadPlan
from tests.models import VOCABULARY, WIDTH, Loader, chunked, make_trainer
from tests.one_window import Windowed, build
from tests.ranks import run_on_ranks
from tests.storage_tracker import StorageTracker
from tests.structure_models import Decoder

BLOCKS = 4
LONG = 64  # tokens of a sample; no other tensor of the model has this size
SAMPLE = LONG * WIDTH * 4  # bytes of the hidden state of a chunk of one sample
COUNTS = [4, 32]  # samples, each of them one chunk
LOCKSTEP, CUT = "lockstep", "cut"


class Pooled(Decoder):
    """Takes one token of each sample to its loss: nothing of the whole batch is held outside its blocks."""

    def __init__(self) -> None:
        super().__init__(BLOCKS)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x[:, -1].clone())), tokens[:, 0])


def is_hidden(tensor: Tensor) -> bool:
    return tensor.shape[-2:] == (LONG, WIDTH) and tensor.is_floating_point()


def peak_of_step(way: str, n: int, options: dict[str, Any]) -> float:
    """Hidden states of one sample alive at the peak of a step of ``n`` samples."""
    micro, samples = (n, 1) if way == LOCKSTEP else (1, n)
    data = [torch.randint(VOCABULARY, (samples, LONG)) for _ in range(micro)]
    module = Windowed(build(Pooled))
    trainer = make_trainer(chunked(1, **options), max_steps=1, accumulate_grad_batches=micro)
    with StorageTracker(is_hidden) as tracker:
        trainer.fit(module, Loader(data))
    assert module.report.chunks == n * module.report.blocks
    assert module.report.offloaded_bytes >= (BLOCKS * n - 1) * SAMPLE
    assert trainer.strategy._applied.store.live_bytes == 0
    return tracker.peak / SAMPLE


def peaks(way: str, options: dict[str, Any]) -> list[float]:
    return [peak_of_step(way, n, options) for n in COUNTS]


# Hidden states that one chunk of these blocks needs beside its own entry and exit.
FORWARD = 5
BACKWARD = 10


@pytest.mark.parametrize("way", [LOCKSTEP, CUT])
def test_two_hidden_states_for_each_chunk_in_flight(way):
    [found] = run_on_ranks(1, peaks, way, {})
    # What goes into a block and what comes out, on the way back their gradients; in lockstep of one after the other.
    expected = [max(2 * n + FORWARD, n + BACKWARD) if way == LOCKSTEP else 2 * n + BACKWARD - 1 for n in COUNTS]
    assert found == expected
    assert (found[-1] - found[0]) / (COUNTS[-1] - COUNTS[0]) <= 2.1


def streaming(*patterns: str) -> dict[str, Any]:
    names = ["net.layers.{*}", *patterns]
    plan = ActivationOffloadPlan(apply_modules=names, stream_hidden_states=True)
    return {"chunkmbs_plan": {"apply_modules": names}, "activation_offload_plan": plan}


def test_streaming_one_batch_leaves_what_enters_the_first_block():
    [found] = run_on_ranks(1, peaks, CUT, streaming())
    assert found == [n + BACKWARD + 1 for n in COUNTS]


def test_streaming_in_lockstep_leaves_what_each_step_makes_itself():
    [found] = run_on_ranks(1, peaks, LOCKSTEP, streaming())
    assert (found[-1] - found[0]) / (COUNTS[-1] - COUNTS[0]) <= 1.1


def test_streaming_in_lockstep_does_not_depend_on_the_number_of_micro_batches():
    [found] = run_on_ranks(1, peaks, LOCKSTEP, streaming("net.embedding"))
    assert found[-1] <= 1.10 * found[0]


# -- host memory ------------------------------------------------------------------------------------------------------


def allocations_by_step(way: str, options: dict[str, Any], n: int = 4, steps: int = 4) -> list[int]:
    """Host buffers allocated until the end of each optimizer step."""
    micro, samples = (n, 1) if way == LOCKSTEP else (1, n)
    data = [torch.randint(VOCABULARY, (samples, LONG)) for _ in range(micro * steps)]
    module = Counting(build(Pooled))
    trainer = make_trainer(chunked(1, **options), max_steps=steps, accumulate_grad_batches=micro)
    trainer.fit(module, Loader(data))
    return module.allocations


class Counting(Windowed):
    def __init__(self, net: Pooled) -> None:
        super().__init__(net)
        self.allocations: list[int] = []

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.allocations.append(self.trainer.strategy._applied.store.allocations)


@pytest.mark.parametrize("options", [{}, streaming()])
@pytest.mark.parametrize("way", [LOCKSTEP, CUT])
def test_host_memory_is_allocated_in_the_first_steps_only(way, options):
    [allocations] = run_on_ranks(1, allocations_by_step, way, options)
    assert len(allocations) == 4
    assert allocations[1] == allocations[-1] > 0
