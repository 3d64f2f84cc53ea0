"""Models that call their blocks in many ways, in lockstep: gradients of the plain model, with as few collectives."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests import structure_models as models
from tests.collectives import count_collectives
from tests.models import BLOCKS, chunked
from tests.one_window import SIZES, accumulate, assert_close, build, micro_batches, train_window
from tests.ranks import run_on_ranks

LAYERS = "net.layers.{*}"
TOWER = "net.tower.{*}"


class Expected(NamedTuple):
    gathers: int
    scatters: int
    runs: int | None  # of autograd, after the tails; None where it does not matter


STACK = Expected(2 * BLOCKS + 1, BLOCKS + 1, 1)
TWICE = Expected(4 * BLOCKS + 1, 2 * BLOCKS + 1, 2)
TOWERS = Expected(2 * (BLOCKS + 2) + 1, BLOCKS + 2 + 1, 2)
STRUCTURES = {
    "Decoder": STACK,
    "DeepSupervision": STACK,
    "ContrastedDepths": STACK,
    "Tied": STACK,
    "FrozenEmbeddings": STACK,
    "SkipAroundTwo": STACK,
    "Tuples": STACK,
    "Dicts": STACK,
    "CodeBetween": STACK._replace(runs=BLOCKS),
    "CodeInPlace": STACK._replace(runs=BLOCKS),
    "SkipIntoABlock": STACK._replace(runs=2),
    "DataDependentDepth": STACK._replace(runs=2),
    "TwoPasses": TWICE,
    # One graph: autograd adds up a parameter's gradients of both passes before there is anything to reduce.
    "Repeated": TWICE._replace(scatters=BLOCKS + 1, runs=1),
    "TwoTowers": TOWERS,
    "SharedMemory": TOWERS._replace(runs=1 + BLOCKS),
    # What is computed before the blocks is used more than once.
    "EmbeddingLoss": STACK._replace(runs=None),
    "EmbeddingSkip": STACK._replace(runs=None),
    "Conditioned": STACK._replace(runs=None),
    "OneEmbedding": TOWERS._replace(runs=None),
}
# What else than the first positional argument carries the batch.
DECLARED: dict[str, dict[str, Any]] = {
    "Tuples": {"chunk_arg_indexs": [0, 1]},
    "SharedMemory": {"chunk_kwarg_names": ["memory"]},
    "Conditioned": {"chunk_kwarg_names": ["condition"]},
}


def strategy(name: str, **options: Any) -> Any:
    towers = [TOWER] if name in ("TwoTowers", "SharedMemory", "OneEmbedding") else []
    return chunked(2, chunkmbs_plan={"apply_modules": [LAYERS, *towers], **DECLARED.get(name, {})}, **options)


def data_of_ranks() -> list[list[Any]]:
    return [micro_batches(SIZES[r:] + SIZES[:r], seed=r) for r in range(dist.get_world_size())]


def train_structure(name: str, options: dict[str, Any]) -> tuple[int, int, int]:
    net, data, rank = build(getattr(models, name)), data_of_ranks(), dist.get_rank()
    with count_collectives() as counted:
        module = train_window(deepcopy(net), data[rank], strategy(name, **options))
    expected, losses = accumulate(net, data)
    assert_close(module.gradients, expected)
    assert [module.losses[i] for i in range(len(SIZES))] == pytest.approx(losses[rank], abs=1e-6)
    assert module.seen.runs == module.seen.autograd, "lockstep counts its runs of autograd"
    assert len(module.seen.runs) == 1, "one window, in lockstep"
    assert (counted.all_gathers, counted.reduce_scatters) == (module.report.all_gathers, module.report.reduce_scatters)
    assert module.report.chunks > module.report.blocks, "micro-batches of three samples are cut"
    return module.report.all_gathers, module.report.reduce_scatters, module.seen.runs[0]


def assert_expected(name: str, results: list[tuple[int, int, int]]) -> None:
    expected = STRUCTURES[name]
    for gathers, scatters, runs in results:
        assert (gathers, scatters) == expected[:2]
        assert expected.runs in (None, runs)


@pytest.mark.parametrize("name", STRUCTURES)
def test_gradients_are_the_plain_models_with_as_many_collectives_as_promised(name):
    assert_expected(name, run_on_ranks(2, train_structure, name, {}))


@pytest.mark.parametrize("name", ["Decoder", "CodeInPlace", "Repeated", "SkipIntoABlock", "Tuples", "SharedMemory"])
def test_gradients_are_the_plain_models_without_offload(name):
    assert_expected(name, run_on_ranks(2, train_structure, name, {"enable_activation_offload": False}))


class Reentrant(models.Decoder):
    """A user's reentrant checkpoint around blocks."""

    def forward(self, tokens):
        x = checkpoint(lambda x: self.layers[1](self.layers[0](x)), self.embed(tokens), use_reentrant=True)
        return self.loss(self.layers[2](x), tokens)


def train_reentrant(**options: Any) -> str:
    net, data = build(Reentrant), micro_batches([2, 2])
    expected, _ = accumulate(deepcopy(net), [data])
    try:
        module = train_window(net, data, chunked(2, chunkmbs_plan=options))
    except RuntimeError as error:
        return str(error)
    assert_close(module.gradients, expected)
    return "right"


def one_by_one() -> str:
    return train_reentrant(max_lockstep=1)


def test_blocks_in_a_reentrant_checkpoint_are_refused_in_lockstep():
    [message] = run_on_ranks(1, train_reentrant)
    assert "a block was called inside torch.utils.checkpoint.checkpoint(use_reentrant=True)" in message
    assert run_on_ranks(1, one_by_one) == ["right"]
