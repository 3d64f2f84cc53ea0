"""Blocks are gathered ahead in the order in which they run, in forward and in backward, and none in vain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import expert_models, structure_models
from tests.collectives import count_collectives
from tests.models import BLOCKS, Block, chunked, fit
from tests.one_window import Windowed, build, micro_batches, observed
from tests.ranks import run_on_ranks
from tests.structure_models import Decoder, TwoTowers
from tests.timeline import COMPUTE, GATHER, Timeline, delayed, recorded

TOWERS = ["net.layers.{*}", "net.tower.{*}"]
EXPERTS = ["net.layers.{*}.experts"]


class Teacher(Decoder):
    """A pass without gradients comes first."""

    def forward(self, tokens):
        with torch.no_grad():
            target = self.run(self.embed(tokens))
        x = self.run(self.embed(tokens))
        return self.loss(x, tokens) + (x - target.flip(1)).square().mean()


class FrozenTower(TwoTowers):
    """Nothing of the tower is back-propagated."""

    def __init__(self):
        super().__init__()
        self.tower.requires_grad_(False)
        self.patches.requires_grad_(False)


KINDS = {**vars(structure_models), **vars(expert_models), "Teacher": Teacher, "FrozenTower": FrozenTower}


def second_step(
    kind: str, ahead: int, sizes: list[int], groups: list[str], watched: Any = recorded
) -> tuple[Timeline, tuple[int, int], int]:
    """What happens in the second optimizer step, when the order is known."""
    module = Windowed(build(KINDS[kind]))
    data = micro_batches(sizes, seed=dist.get_rank())
    towers = TOWERS if hasattr(module.net, "tower") else TOWERS[:1]
    plan = {"apply_modules": towers, "chunk_kwarg_names": ["memory"] if kind == "SharedMemory" else []}
    options = {"forward_prefetch": ahead, "apply_modules": groups}
    strategy = chunked(2, chunkmbs_plan=plan, fsdp_plan=options)
    with watched(module.net, Block) as timeline, observed() as seen:
        fit(module, [*data, *data], strategy, accumulate_grad_batches=len(sizes))
    return timeline, (module.report.all_gathers, module.report.reduce_scatters), (seen.runs or [1])[-1]


def phases(timeline: Timeline) -> list[list[tuple[int, str]]]:
    """Where blocks compute, in forward and in backward: position and name."""
    return [[(i, n) for i, (k, n) in enumerate(timeline.events) if k == kind] for kind in ("run", "recompute")]


def assert_ahead(timeline: Timeline, ahead: int) -> None:
    """Each block's gather comes just before the computation of the one ``ahead`` places before it."""
    forward, backward = phases(timeline)
    blocks = {name for _, name in forward}
    for phase, start in (forward, 0), (backward, forward[-1][0]):
        gathers = [(i, n) for i, (k, n) in enumerate(timeline.events) if k == "gather" and n in blocks and i >= start]
        gathers = gathers[: len(phase)]
        assert [name for _, name in gathers] == [name for _, name in phase], "not the order in which they run"
        for i, (position, _) in enumerate(gathers):
            assert position < phase[max(0, i - ahead)][0]
            if i > ahead:
                assert position > phase[i - ahead - 1][0], "gathered too early"


STACK, TWO = 2 * BLOCKS + 1, 2 * (BLOCKS + 2) + 1
LOCKSTEP, CUT = [3, 1, 2, 3], [4]
CASES = {
    "Decoder": (LOCKSTEP, STACK, 1),
    "CodeBetween": (LOCKSTEP, STACK, BLOCKS),
    "TwoTowers": (LOCKSTEP, TWO, 2),  # defined after the blocks, run before them
    "SharedMemory": (LOCKSTEP, TWO, 1 + BLOCKS),
    "TwoPasses": (LOCKSTEP, 4 * BLOCKS + 1, 2),
    "Repeated": (LOCKSTEP, 4 * BLOCKS + 1, 1),
    "Teacher": (LOCKSTEP, 3 * BLOCKS + 1, 1),
    "FrozenTower": (LOCKSTEP, TWO - 2, 1),
}


@pytest.mark.parametrize("kind", CASES)
def test_in_lockstep_the_next_block_is_gathered_while_one_computes(kind):
    sizes, gathers, runs = CASES[kind]
    for timeline, (gathered, _), ran in run_on_ranks(2, second_step, kind, 1, sizes, []):
        assert (gathered, ran) == (gathers, runs)
        assert timeline.unused == []
        assert_ahead(timeline, 1)


@pytest.mark.parametrize("kind", ["Decoder", "TwoTowers"])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_as_many_blocks_are_gathered_ahead_as_the_plan_says(kind, ahead):
    for timeline, (gathered, _), _ in run_on_ranks(2, second_step, kind, ahead, CUT, []):
        assert gathered == CASES[kind][1]
        assert timeline.unused == []
        assert_ahead(timeline, ahead)


def test_experts_are_gathered_ahead_with_their_block():
    for timeline, (gathered, _), _ in run_on_ranks(2, second_step, "Mixture", 1, LOCKSTEP, EXPERTS):
        assert gathered == 2 * STACK - 1
        assert timeline.unused == []
        assert_ahead(timeline, 1)
        last = timeline.events.index(("recompute", "layers.2"))
        assert timeline.events.index(("gather", "layers.1.experts"), last - 2) < last


def test_only_the_first_gather_of_a_pass_is_waited_for():
    """As long as a gather takes no longer than a block's computation."""
    for timeline, _, runs in run_on_ranks(2, second_step, "CodeBetween", 1, LOCKSTEP, []):
        assert runs == BLOCKS
        assert COMPUTE * len(LOCKSTEP) >= GATHER, "a block has that many chunks at least"
        waits = [name for name, left in timeline.waits if left]
        assert waits == ["root", "layers.0", "layers.2"]
    for timeline, _, _ in run_on_ranks(2, second_step, "CodeBetween", 0, LOCKSTEP, []):
        assert len([name for name, left in timeline.waits if left]) == STACK


@pytest.mark.parametrize("kind", ["Decoder", "CodeBetween", "TwoTowers", "Repeated"])
def test_on_a_process_group_that_takes_its_time(kind):
    """The next gather is under way before a block computes, and only a pass's first is waited for."""
    sizes, gathers, runs = CASES[kind]
    for timeline, (gathered, _), ran in run_on_ranks(2, second_step, kind, 1, sizes, [], delayed):
        assert (gathered, ran) == (gathers, runs)
        assert len(timeline.waits) == gathers, "each gather is waited for once"
        assert_ahead(timeline, 1)
        forward, backward = phases(timeline)
        waits = [name for name, left in timeline.waits if left]
        # The last block of the forward pass is the first of the backward pass, gathered again.
        assert waits == ["root", forward[0][1], backward[0][1]]


def test_without_prefetch_the_process_group_is_waited_for():
    for timeline, (gathered, _), _ in run_on_ranks(2, second_step, "CodeBetween", 0, LOCKSTEP, [], delayed):
        assert gathered == len([name for name, left in timeline.waits if left]) == STACK


class TwoOptimizers(Windowed):
    """Back-propagates between the passes of a step, the second time from its last block."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer, net = self.optimizers(), self.net
        for layers in (net.layers[:2], net.layers[2:]):
            optimizer.zero_grad()
            x = net.embed(batch)
            for layer in layers:
                x = layer(x)
            self.manual_backward(net.loss(x, batch))
            optimizer.step()


def manual_step() -> tuple[Timeline, int]:
    module = TwoOptimizers(build(Decoder))
    with recorded(module.net, Block) as timeline, count_collectives() as counted:
        fit(module, micro_batches([4, 4], seed=dist.get_rank()), chunked(2))
    return timeline, counted.all_gathers


def test_a_backward_pass_inside_a_step_ends_what_is_gathered_ahead():
    for timeline, gathered in run_on_ranks(2, manual_step):
        # The root is gathered twice a step; the first step does not know of the backward pass before the last block.
        assert gathered == 2 * (2 * BLOCKS + 2) + 1
        assert timeline.unused == []
