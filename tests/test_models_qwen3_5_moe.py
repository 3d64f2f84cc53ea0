"""Qwen3.5-MoE with images in some samples only, with the keys of the strategy exactly as documented."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from lightning_chunkmbs import ChunkMBSStrategy
from tests.documented import INIT_ARGS
from tests.model_zoo import BLOCKS, FOLDER, build, image_batch, init_args, window
from tests.one_window import accumulate, assert_close, train_window
from tests.ranks import raises_on_ranks, run_on_ranks

NAME = "qwen3_5_moe"
EXACT = yaml.safe_load(INIT_ARGS)
TOWER = 2  # blocks
LAYERS = BLOCKS[NAME] - TOWER


def test_the_file_has_the_documented_keys_and_the_attribute_that_accumulation_needs() -> None:
    written = init_args(NAME, attribute="model")
    assert written["chunkmbs_plan"].pop("lockstep_attributes") == ["model.model.rope_deltas"]
    assert written == EXACT
    assert INIT_ARGS in "".join(line[6:] or "\n" for line in (FOLDER / f"{NAME}.yaml").open() if line[:6].isspace())


def data_of(case: str) -> list[list[dict[str, torch.Tensor]]]:
    """Micro-batches of both ranks; images are in some samples, and in micro-batches of the first rank only."""
    with_images = [image_batch(counts, 3, seed) for seed, counts in enumerate([[1, 0, 2], [0, 1]])]
    if case == "cut":
        return [[image_batch([1, 0, 2, 0, 1], 4, 7)], window(NAME, [3], seed=8)]
    first, second = window(NAME, [1, 3], seed=1)
    return [[with_images[0], first, with_images[1], second], window(NAME, [2, 1, 3, 2], seed=2)]


def compare(case: str, arguments: dict[str, Any]) -> tuple[int, ...]:
    rank, data = dist.get_rank(), data_of(case)
    net = build(NAME)
    module = train_window(deepcopy(net), data[rank], ChunkMBSStrategy(**arguments))
    expected, losses = accumulate(net, data)
    assert_close(module.gradients, expected)
    assert [module.losses[i] for i in range(len(data[rank]))] == pytest.approx(losses[rank], abs=2e-6)
    assert any("visual" in name for name in expected)
    assert any("linear_attn" in name for name in expected)
    assert any("self_attn" in name for name in expected)
    assert any("experts" in name for name in expected)
    report = module.report
    assert report.offloaded_bytes == report.reloaded_bytes > 0
    return report.all_gathers, report.reduce_scatters, report.chunks


@pytest.mark.parametrize(
    ("case", "arguments", "chunks"),
    [
        # Chunks of layers, and one of the tower for each micro-batch with images.
        ("lockstep", init_args(NAME), [LAYERS * (2 + 1 + 1 + 2) + TOWER * 2, LAYERS * (1 + 1 + 2 + 1)]),
        ("cut", EXACT, [LAYERS * 3 + TOWER, LAYERS * 2]),
    ],
    ids=["lockstep", "cut"],
)
def test_images_in_some_samples_of_one_rank_train_as_in_one_process(case, arguments, chunks) -> None:
    counts = [(2 * BLOCKS[NAME] + 1, BLOCKS[NAME] + 1, of_rank) for of_rank in chunks]
    assert run_on_ranks(2, compare, case, arguments) == counts


def test_the_documented_keys_alone_accumulate_images_after_the_attribute_is_named() -> None:
    for kind, message in raises_on_ranks(2, compare, "lockstep", EXACT):
        assert kind == "RuntimeError"
        assert "lockstep_attributes: ['net.model.rope_deltas']" in message
