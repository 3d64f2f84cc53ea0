"""Streaming: hidden states on the host, in steps of every structure; and the whole strategy on copies that run late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lightning_chunkmbs.host_tensor import HostTensor
from lightning_chunkmbs.offload import ActivationStore
from tests import structure_models as models
from tests.delayed_streams import DelayedStreams
from tests.models import BLOCKS, chunked
from tests.one_window import Windowed, accumulate, build, micro_batches, train_window
from tests.ranks import run_on_ranks
from tests.structure_models import Decoder
from tests.test_lockstep_structure import DECLARED, LAYERS, STRUCTURES, TOWER

WINDOWS = {"lockstep": [5, 1, 3, 2], "one batch": [5]}


def strategy(kind: str, stream: bool, **options: Any) -> Any:
    names = [LAYERS, TOWER] if hasattr(build(getattr(models, kind)), "tower") else [LAYERS]
    plan = {"apply_modules": names, "stream_hidden_states": stream}
    return chunked(2, chunkmbs_plan={"apply_modules": names, **DECLARED.get(kind, {})}, activation_offload_plan=plan)


def trained(kind: str, sizes: list[int], stream: bool) -> Windowed:
    net = build(getattr(models, kind))
    module = train_window(net, micro_batches(sizes), strategy(kind, stream))
    assert module.trainer.strategy._applied.store.live_bytes == 0
    return module


@contextmanager
def counted_on_the_host() -> Iterator[list[int]]:
    """Count the tensors that are put away. (A mock would hold them.)"""
    count, put_away = [0], HostTensor.put_away

    def counting(tensor: Tensor, put: Any) -> HostTensor:
        count[0] += 1
        return put_away(tensor, put)

    with patch.object(HostTensor, "put_away", counting):
        yield count


def streamed_and_not(kinds: list[str], sizes: list[int]) -> list[str]:
    wrong = []
    for kind in kinds:
        plain = trained(kind, sizes, False)
        with counted_on_the_host() as count:
            ours = trained(kind, sizes, True)
        assert count[0] >= 2 * BLOCKS * len(sizes)  # exits, and their gradients
        assert ours.report.offloaded_bytes > plain.report.offloaded_bytes or kind == "Tuples"
        assert ours.losses == plain.losses
        assert ours.gradients.keys() == plain.gradients.keys()
        wrong += [f"{kind} {n}" for n, g in ours.gradients.items() if not torch.equal(g, plain.gradients[n])]
    return wrong


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("part", range(3))
def test_gradients_are_bitwise_those_without_streaming(part, window):
    [wrong] = run_on_ranks(1, streamed_and_not, sorted(STRUCTURES)[part::3], WINDOWS[window])
    assert wrong == []


class DataChanged(Decoder):
    """Changes values between blocks past autograd."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers[0](self.embed(tokens))
        x.data.mul_(2)
        x = self.layers[1](x)
        x.detach().numpy()[:] *= 0.5
        return self.loss(self.layers[2](x), tokens)


def data_changed(stream: bool, sizes: list[int]) -> float:
    net, data = build(DataChanged), micro_batches(sizes)
    expected, _ = accumulate(deepcopy(net), [data])
    module = train_window(net, data, strategy("Decoder", stream))
    return max((module.gradients[n] - g).abs().max().item() for n, g in expected.items())


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("stream", [False, True])
def test_values_changed_past_autograd_are_those_that_count(stream, window):
    [error] = run_on_ranks(1, data_changed, stream, WINDOWS[window])
    assert error < 1e-5


# -- copies that run late ---------------------------------------------------------------------------------------------


def trained_late(kind: str, sizes: list[int], stream: bool, seed: int | None) -> tuple[Windowed, int]:
    streams = DelayedStreams(seed)
    late = partial(ActivationStore, streams=lambda device: streams)
    with patch("lightning_chunkmbs.apply.ActivationStore", late), streams:
        return trained(kind, sizes, stream), streams.copies


def differences_when_late(kind: str, window: list[int], seeds: int) -> list[str]:
    wrong, expected = [], trained(kind, window, False)
    for seed in range(seeds):
        ours, copies = trained_late(kind, window, seed % 2 == 0, seed or None)
        assert copies > BLOCKS * sum(-(-size // 2) for size in window)
        assert ours.gradients.keys() == expected.gradients.keys()
        wrong += [f"{seed} {n}" for n, g in ours.gradients.items() if not torch.equal(g, expected.gradients[n])]
    return wrong


@pytest.mark.parametrize("kind", ["Decoder", "CodeInPlace", "SkipIntoABlock", "Tuples", "TwoPasses"])
def test_gradients_are_the_same_however_late_copies_run(kind):
    for window in WINDOWS.values():
        assert run_on_ranks(1, differences_when_late, kind, window, 6) == [[]]
