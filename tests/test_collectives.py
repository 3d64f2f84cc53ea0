"""Collectives of an optimizer step, counted where torch.distributed runs them, beside those of the step report."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_chunkmbs import StepReport
from lightning_chunkmbs.fsdp2 import fsdp_state
from tests.collectives import Collectives, count_collectives
from tests.models import BLOCKS, Stack, Trained, batches, chunked, fit
from tests.ranks import run_on_ranks

BATCH = 8
STEPS = 3


class Counts(NamedTuple):
    gathers: int
    scatters: int


class StepCounts(Callback):
    """Counts of every training step, from its first hook to its last."""

    def __init__(self, counted: Collectives) -> None:
        self.counted = counted
        self.steps: list[Counts] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.before = Counts(self.counted.all_gathers, self.counted.reduce_scatters)

    def on_train_batch_end(self, *_: Any) -> None:
        gathers, scatters = self.before
        self.steps.append(Counts(self.counted.all_gathers - gathers, self.counted.reduce_scatters - scatters))


class Result(NamedTuple):
    steps: list[Counts]  # in the steps, by torch.distributed
    total: Counts  # in the whole run
    reports: list[StepReport]
    losses: list[float]


class Unobserved(Trained):
    """Reads no gradients, which would gather them."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert all(p.grad is not None for p in self.parameters())


def train(options: dict[str, Any], trainer_options: dict[str, Any], sizes: list[int] | None = None) -> Result:
    torch.manual_seed(1)
    module = Unobserved(Stack())
    sizes = sizes or [BATCH] * STEPS
    with count_collectives() as counted:
        steps = StepCounts(counted)
        fit(module, batches(sizes, seed=dist.get_rank()), chunked(**options), callbacks=[steps], **trainer_options)
        total = Counts(counted.all_gathers, counted.reduce_scatters)
    return Result(steps.steps, total, module.record.reports, module.record.losses)


def train_each(options: list[dict[str, Any]], trainer_options: dict[str, Any]) -> list[Result]:
    return [train(o, trainer_options) for o in options]


def counts_of(options: list[dict[str, Any]], **trainer_options: Any) -> list[Result]:
    """Results on two ranks, which must agree, after checking that reports say what was counted."""
    ours, theirs = run_on_ranks(2, train_each, options, trainer_options)
    for one, other in zip(ours, theirs, strict=True):
        assert one.steps == other.steps
        assert len(one.steps) == len(one.reports) == STEPS
        for result in (one, other):
            assert [Counts(r.all_gathers, r.reduce_scatters) for r in result.reports] == result.steps
            assert all(r.offloaded_bytes == r.reloaded_bytes > 0 for r in result.reports)
    return ours


@pytest.mark.parametrize("reshard", [True, False])
def test_a_step_gathers_each_block_once_per_pass_however_many_chunks(reshard):
    sizes = {math.ceil(BATCH / chunks): chunks for chunks in (1, 2, 3, 4, 8)}
    fsdp_plan = {"reshard_after_forward": reshard}
    results = counts_of([{"chunk_mbs": size, "fsdp_plan": fsdp_plan} for size in sizes])
    for chunks, result in zip(sizes.values(), results, strict=True):
        assert [r.chunks for r in result.reports] == [BLOCKS * chunks] * STEPS
        assert result.steps == [Counts(2 * BLOCKS + 1 if reshard else BLOCKS + 1, BLOCKS + 1)] * STEPS


def test_a_further_group_is_gathered_and_reduced_once():
    head = {"apply_modules": ["net.head"]}
    two = {"apply_modules": ["net.head", "net.embedding"]}
    nested = {"apply_modules": ["net", "net.head"]}
    results = counts_of([{"chunk_mbs": 2, "fsdp_plan": plan} for plan in (head, two, nested)])
    assert results[0].steps == [Counts(2 * BLOCKS + 2, BLOCKS + 2)] * STEPS
    assert results[1].steps == [Counts(2 * BLOCKS + 3, BLOCKS + 3)] * STEPS
    # All parameters of the root are in "net" here, and a group without parameters communicates nothing.
    assert results[2].steps == [Counts(2 * BLOCKS + 2, BLOCKS + 2)] * STEPS


def test_prefetching_changes_neither_counts_nor_losses():
    plans = [{"forward_prefetch": n, "reshard_after_forward": r} for r in (True, False) for n in (0, 1, 2)]
    results = counts_of([{"chunk_mbs": 2, "fsdp_plan": plan} for plan in plans])
    for plan, result in zip(plans, results, strict=True):
        gathers = 2 * BLOCKS + 1 if plan["reshard_after_forward"] else BLOCKS + 1
        assert result.steps == [Counts(gathers, BLOCKS + 1)] * STEPS
        assert result.losses == results[0].losses


def test_without_offload_the_counts_are_the_same():
    for [result] in run_on_ranks(2, train_each, [{"chunk_mbs": 2, "enable_activation_offload": False}], {}):
        assert result.steps == [Counts(2 * BLOCKS + 1, BLOCKS + 1)] * STEPS
        assert [(r.chunks, r.offloaded_bytes) for r in result.reports] == [(BLOCKS * 4, 0)] * STEPS


@pytest.mark.parametrize("reshard", [True, False])
def test_validation_is_in_no_report(reshard):
    options = {"chunk_mbs": 2, "fsdp_plan": {"reshard_after_forward": reshard}}
    [result] = counts_of([options], val_check_interval=1, num_sanity_val_steps=1)
    gathers = 2 * BLOCKS + 1 if reshard else BLOCKS + 1
    assert result.steps == [Counts(gathers, BLOCKS + 1)] * STEPS
    assert [r.chunks for r in result.reports] == [BLOCKS * 4] * STEPS
    # One validation batch after every step and one before the first, each with a gather of every group.
    validations = (STEPS + 1) * (BLOCKS + 1)
    assert result.total == Counts(STEPS * gathers + validations, STEPS * (BLOCKS + 1))


class Begun(Callback):
    """Counts how often FSDP2 begins the backward pass of a block."""

    def __init__(self) -> None:
        self.blocks: list[Any] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        states = [fsdp_state(layer) for layer in module.net.layers]
        self.owner = type(states[0])
        self.original = self.owner._pre_backward

        def counted(state: Any, grad: torch.Tensor) -> torch.Tensor:
            self.blocks += [states.index(state)] if state in states else []
            return self.original(state, grad)

        self.owner._pre_backward = counted

    def on_train_end(self, *_: Any) -> None:
        self.owner._pre_backward = self.original


def begun_blocks(chunk_mbs: int, accumulate: int) -> tuple[list[int], list[StepReport]]:
    module, begun = Unobserved(Stack()), Begun()
    data = batches([BATCH] * accumulate)
    fit(module, data, chunked(chunk_mbs), callbacks=[begun], accumulate_grad_batches=accumulate)
    return begun.blocks, module.record.reports


@pytest.mark.parametrize(("chunk_mbs", "accumulate"), [(2, 1), (BATCH, 4), (4, 2)])
def test_the_backward_pass_of_a_block_begins_once_however_many_chunks(chunk_mbs, accumulate):
    for blocks, reports in run_on_ranks(2, begun_blocks, chunk_mbs, accumulate):
        assert sum(report.chunks for report in reports) == 4 * BLOCKS
        assert blocks == [*reversed(range(BLOCKS))]


def train_unequally(sizes: list[list[int]]) -> Result:
    return train({"chunk_mbs": 1}, {}, sizes[dist.get_rank()])


def test_ranks_with_unequal_numbers_of_chunks_gather_together():
    sizes = [[8, 1, 2], [3, 8, 1]]
    for rank, result in enumerate(run_on_ranks(2, train_unequally, sizes)):
        assert result.steps == [Counts(2 * BLOCKS + 1, BLOCKS + 1)] * STEPS
        assert [r.chunks for r in result.reports] == [BLOCKS * size for size in sizes[rank]]


def test_one_rank_communicates_nothing():
    [[result]] = run_on_ranks(1, train_each, [{"chunk_mbs": 2}], {})
    assert result.total == Counts(0, 0)
    assert [r.all_gathers + r.reduce_scatters for r in result.reports] == [0] * STEPS
    assert [r.chunks for r in result.reports] == [BLOCKS * 4] * STEPS
