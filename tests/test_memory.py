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
    return tracker.peak / SAMPLE


def peaks(way: str, counts: list[int], options: dict[str, Any]) -> list[float]:
    return [peak_of_step(way, n, options) for n in counts]


@pytest.mark.parametrize("way", [LOCKSTEP, CUT])
def test_growth_of_the_peak(way):
    [(few, many)] = run_on_ranks(1, peaks, way, [4, 32], {})
    print(few, many, (many - few) / 28)
    assert (many - few) / 28 <= 2.1


STREAM = {"activation_offload_plan": ActivationOffloadPlan(apply_modules=["net.layers.{*}"], stream_hidden_states=True)}


@pytest.mark.parametrize("way", [LOCKSTEP, CUT])
def test_stream(way):
    [(few, many)] = run_on_ranks(1, peaks, way, [4, 32], STREAM)
    print(few, many, (many - few) / 28)
    assert (many - few) / 28 <= 1.1
