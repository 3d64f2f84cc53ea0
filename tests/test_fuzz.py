"""Some of the random cases of ``make fuzz``, each beside plain torch."""

from __future__ import annotations

import pytest

from lightning_chunkmbs import StepReport
from tests.fuzz import check, draw
from tests.ranks import run_on_ranks

SEEDS = range(1000, 1050)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_case_trains_as_plain_torch(seed):
    case = draw(seed)
    for report in run_on_ranks(case.ranks, check, seed):
        assert isinstance(report, StepReport)
        assert report.chunks >= report.blocks > 0


def test_the_cases_cover_what_they_are_for():
    cases = [draw(seed) for seed in SEEDS]
    calls = [op for case in cases for op in case.net.program if op.kind == "call"]
    assert {case.ranks for case in cases} == {1, 2}
    assert {case.n for case in cases} == {1, 2, 3, 4, 5}
    assert {len(case.net.stacks) for case in cases} == {1, 2}
    assert {side for op in calls for side in op.sides} == {"mask", "table", "condition", "ids", "extras", "shared"}
    assert {op.kind for case in cases for op in case.net.program} >= {"add", "between", "inplace", "loss", "no_grad"}
    assert {case.net.batch_dim for case in cases} == {0, 1}
    for rare in ("repeated", "tied_head", "frozen"):
        assert any(getattr(case.net, rare) for case in cases), rare
    assert any(op.only_some for op in calls)
    assert len({case.net.mask_dtype for case in cases}) == 6
    offloads = [case.options.get("activation_offload_plan", {}).get("stream_hidden_states") for case in cases]
    assert set(offloads) == {True, False, None}
    assert any(case.options["recompute_plan"]["save_ops"] for case in cases)
    assert {case.options["chunkmbs_plan"]["max_lockstep"] for case in cases} == {None, 1, 2, 3}
