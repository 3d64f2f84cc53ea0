"""Every architecture of ``configs/models`` with the plan of its yaml file, beside the plain model on two processes."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch.distributed as dist

from tests.collectives import count_collectives
from tests.model_zoo import BLOCKS, build, strategy, window
from tests.one_window import accumulate, assert_close, train_window
from tests.ranks import run_on_ranks

LOCKSTEP = ([3, 1, 2, 3], [2, 4, 1, 1])  # samples of each micro-batch, of each rank
CUT = ([5], [3])
CHUNK = 2  # as in the files


def compare(name: str) -> list[tuple[int, int, int, int]]:
    """Train a window in lockstep, and one large batch cut; returns what was counted of each."""
    rank, found = dist.get_rank(), []
    for sizes in (LOCKSTEP, CUT):
        net, data = build(name), [window(name, of_rank, seed=r) for r, of_rank in enumerate(sizes)]
        with count_collectives() as counted:
            module = train_window(deepcopy(net), data[rank], strategy(name))
        expected, losses = accumulate(net, data)
        assert_close(module.gradients, expected)
        assert [module.losses[i] for i in range(len(sizes[rank]))] == pytest.approx(losses[rank], abs=2e-6)
        report = module.report
        assert (counted.all_gathers, counted.reduce_scatters) == (report.all_gathers, report.reduce_scatters)
        assert report.offloaded_bytes == report.reloaded_bytes > 0
        found.append((report.all_gathers, report.reduce_scatters, report.blocks, report.chunks))
    return found


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "qwen3_5_moe"])
def test_a_model_trains_as_the_plain_one_in_lockstep_and_cut(name: str) -> None:
    blocks = BLOCKS[name]
    for rank, counts in enumerate(run_on_ranks(2, compare, name)):
        for sizes, (gathers, scatters, calls, chunks) in zip((LOCKSTEP, CUT), counts, strict=True):
            assert (gathers, scatters, calls) == (2 * blocks + 1, blocks + 1, blocks)
            assert chunks == blocks * sum(-(-size // CHUNK) for size in sizes[rank])
