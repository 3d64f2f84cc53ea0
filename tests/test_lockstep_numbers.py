"""Lockstep in one process: gradients bit for bit those of one micro-batch after the other, and the bytes it keeps."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import structure_models as models
from tests.models import BLOCKS, VOCABULARY, WIDTH, Loader, chunked, make_trainer
from tests.one_window import (
    LENGTHS,
    Windowed,
    accumulate,
    assert_close,
    build,
    chunk_by_chunk,
    different,
    micro_batches,
    observed,
    train_window,
)
from tests.ranks import run_on_ranks
from tests.storage_tracker import StorageTracker
from tests.structure_models import Decoder

# Autograd adds these up over the micro-batches in another order.
EMBEDDINGS = {"embedding.weight", "position"}
WINDOWS: dict[str, dict[str, Any]] = {
    "one chunk each": {"sizes": [2, 2, 2, 2], "lengths": [6]},
    "ragged": {"sizes": [2, 1, 2, 1], "lengths": LENGTHS},
    "cut": {"sizes": [4, 4, 4], "lengths": [6]},
    "ragged and cut": {"sizes": [5, 1, 3, 2, 7], "lengths": LENGTHS},
}


# -- gradients -------------------------------------------------------------------------------------------------------


def differing(kind: str, window: dict[str, Any], **options: Any) -> tuple[set[str], int]:
    """Train a window; return which gradients differ from chunk after chunk, and how many chunks a block ran."""
    net, data = build(getattr(models, kind)), micro_batches(**window)
    module = train_window(deepcopy(net), data, chunked(2, **options))
    assert module.seen.runs == [1], "in lockstep, in one run of autograd"
    plain, by_chunks = deepcopy(net), deepcopy(net)
    assert_close(module.gradients, accumulate(plain, [data])[0])
    chunk_by_chunk(by_chunks.layers, 2)
    expected, losses = accumulate(by_chunks, [data])
    assert_close(module.gradients, expected)
    assert [module.losses[i] for i in range(len(data))] == losses[0]
    return different(module.gradients, expected), module.report.chunks // BLOCKS


@pytest.mark.parametrize("window", WINDOWS)
def test_gradients_are_bit_for_bit_those_of_micro_batches_one_after_the_other(window):
    [(names, chunks)] = run_on_ranks(1, differing, "Decoder", WINDOWS[window])
    assert names <= EMBEDDINGS
    assert chunks == sum(-(-size // 2) for size in WINDOWS[window]["sizes"])


@pytest.mark.parametrize(("kind", "others"), [("Tied", {"head.weight"}), ("DeepSupervision", {"norm", "head"})])
def test_blocks_stay_bit_for_bit_beside_other_uses(kind, others):
    [(names, _)] = run_on_ranks(1, differing, kind, WINDOWS["ragged and cut"])
    assert {name for name in names - EMBEDDINGS if not name.startswith(tuple(others))} == set()


def differing_from_no_lockstep(window: dict[str, Any]) -> set[str]:
    net, data = build(), micro_batches(**window)
    gradients = []
    for most in (None, 1):
        module = train_window(deepcopy(net), data, chunked(2, chunkmbs_plan={"max_lockstep": most}))
        assert len(module.seen.runs) == (most is None)
        gradients.append(module.gradients)
    return different(*gradients)


@pytest.mark.parametrize("window", ["one chunk each", "ragged"])
def test_max_lockstep_1_gives_bit_for_bit_the_same_when_nothing_is_cut(window):
    [names] = run_on_ranks(1, differing_from_no_lockstep, WINDOWS[window])
    assert names <= EMBEDDINGS


# -- what is changed in place ----------------------------------------------------------------------------------------


class ChangedLater(Decoder):
    """Changes a hidden state after a block has taken it."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers[0](self.embed(tokens))
        y = self.layers[1](x)
        x.add_(self.position[: x.shape[1]])
        return self.loss(self.layers[2](x + y), tokens)


def train_changed_later(offload: bool) -> str | float:
    net, data = build(ChangedLater), micro_batches([2, 2])
    plain = deepcopy(net)
    # The oracle keeps the value that the block took.
    plain.layers[1].register_forward_pre_hook(lambda _, args: (args[0].clone(),))
    expected, _ = accumulate(plain, [data])
    try:
        module = train_window(deepcopy(net), data, chunked(2, enable_activation_offload=offload))
    except RuntimeError as error:
        return str(error)
    return max((module.gradients[name] - expected[name]).abs().max().item() for name in expected)


@pytest.mark.parametrize("offload", [True, False])
def test_a_hidden_state_changed_after_a_block_has_taken_it_is_an_error_or_harmless(offload):
    [outcome] = run_on_ranks(1, train_changed_later, offload)
    assert outcome < 1e-6 if isinstance(outcome, float) else "modified by an inplace operation" in outcome


# -- bytes -----------------------------------------------------------------------------------------------------------

LONG = 64


class Long(Decoder):
    """Sequences long enough for a micro-batch's activations to outweigh the weights."""

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)


def peak_of(kind: type, n: int, blocks: int, shape: tuple[int, ...], **options: Any) -> tuple[int, int, Windowed]:
    """Most bytes alive of tensors whose last dimensions are ``shape``, on device and host, in one window of ``n``."""
    module = Windowed(build(kind, blocks))
    data = micro_batches([4] * n, [LONG])
    tracker = StorageTracker(lambda t: t.ndim > len(shape) and t.shape[-len(shape) :] == shape)
    with observed() as module.seen:
        trainer = make_trainer(chunked(2, **options), accumulate_grad_batches=n)
        with tracker:
            trainer.fit(module, Loader(data))
    assert len(module.seen.runs) == (n > 1)
    return tracker.peak, tracker.host_peak, module


def logits_peaks() -> list[int]:
    return [peak_of(Long, n, BLOCKS, (VOCABULARY,))[0] for n in (1, 8)]


def test_logits_of_one_micro_batch_are_alive_at_a_time():
    [(one, eight)] = run_on_ranks(1, logits_peaks)
    assert one >= 4 * LONG * VOCABULARY * 4
    assert eight <= 1.05 * one


def hidden_peaks(offload: bool) -> tuple[list[int], list[int]]:
    peaks = [peak_of(Long, 4, b, (LONG, WIDTH), enable_activation_offload=offload)[:2] for b in (4, 8)]
    return [device for device, _ in peaks], [host for _, host in peaks]


def test_hidden_states_alive_do_not_grow_with_the_number_of_blocks():
    [((four, eight), hosts)] = run_on_ranks(1, hidden_peaks, True)
    sample = LONG * WIDTH * 4
    assert four >= 4 * 4 * sample  # the hidden state of every micro-batch
    assert eight <= four + 2 * sample  # one chunk
    assert hosts == [(4 * 16 - 2) * sample, (8 * 16 - 2) * sample]  # the chunk that backward needs first stays


def test_without_offload_they_do_grow():
    [((four, eight), hosts)] = run_on_ranks(1, hidden_peaks, False)
    assert eight >= four + 4 * 16 * LONG * WIDTH * 4 * 0.9
    assert hosts == [0, 0]


# -- the tracker -----------------------------------------------------------------------------------------------------


def test_the_tracker_follows_storages_not_tensors():
    with StorageTracker() as tracker:
        a = torch.zeros(10)
        view = a.view(2, 5)[1:]
        assert tracker.live == 40
        del a
        assert tracker.live == 40
        del view
        assert tracker.live == 0
        b = torch.zeros(5) + 1  # two at a time
    assert tracker.peak == 40
    del b
    assert tracker.live == 0


def test_the_tracker_sees_what_autograd_keeps_and_only_what_is_asked_for():
    x = torch.ones(3, 4, requires_grad=True)
    with StorageTracker(lambda t: t.shape[-1:] == (4,)) as tracker:
        loss = (x * 2).exp().sum()
        assert tracker.live == 48  # exp keeps its result
        assert tracker.peak == 96
        loss.backward()
        assert tracker.live == 48  # the gradient
