"""Groups inside blocks and compiled blocks, on four processes in two dimensions."""

from unittest.mock import patch

import pytest
import torch
from torch._dynamo.utils import counters

from tests.collectives import count_collectives
from tests.mesh_models import (
    WORLD,
    Meshed,
    Scaled,
    ScaledMixture,
    clip_and_resume,
    own_part,
    ranks_with_data,
    strategy_of,
)
from tests.models import BLOCKS, VOCABULARY
from tests.one_window import accumulate, assert_close, build, train_window
from tests.ranks import run_on_ranks

MESHES = ["replicas", "tensor parallel"]
EXPERTS = {"apply_modules": ["net.layers.{*}.experts"]}
COMPILED = {"compile_blocks": True}
# Samples and length of each micro-batch of each rank with data; the second has none that is long enough for experts.
UNEVEN = [[(3, 8), (1, 5), (4, 7), (2, 6)], [(1, 6), (5, 5), (2, 4), (1, 6)], [(1, 7)] * 4, [(2, 5), (2, 8)] * 2]
# What tensor parallelism compiles once for each shape: chunks of two samples and of one.
EVEN = [[(3, 8), (2, 8), (4, 8), (1, 8)], [(1, 8), (5, 8), (2, 8), (1, 8)], [(1, 8)] * 4, [(2, 8)] * 4]
TOGETHER = [[(6, 8)], [(3, 6)], [(1, 8)], [(5, 7)]]  # one batch, cut


def data_of(mesh, shapes):
    generator = torch.Generator().manual_seed(3)
    data = [[torch.randint(VOCABULARY, shape, generator=generator) for shape in rank] for rank in shapes]
    return data[: ranks_with_data(mesh)]


def window(mesh, kind, plan, shapes, precision="32-true", passes=1):
    """One window equals one process, with each group gathered and reduced once in a pass."""
    data, module = data_of(mesh, shapes), Meshed(build(kind))
    strategy = strategy_of(mesh, fsdp_plan=plan, chunkmbs_plan={"max_lockstep": len(data[0]) // passes})
    with count_collectives() as module.counted:
        train_window(module, own_part(mesh, data), strategy, precision=precision)
    groups = (2 if plan is EXPERTS else 1) * BLOCKS + 1
    once = (passes * (2 * groups - 1), passes * groups)
    assert (module.report.all_gathers, module.report.reduce_scatters) == once
    assert (module.counted.all_gathers, module.counted.reduce_scatters) == once
    before, after = module.all_reduces
    # One for each group in a pass between replicas, or for each micro-batch on the host; one for what is held whole,
    # (on the host) one in a pass for what no rank has used, one before each micro-batch of a loader of another kind.
    assert after - before == (passes * groups if mesh == "replicas" else len(data[0])) + 1 + passes + len(data[0])
    assert_close(module.gradients, accumulate(build(kind), data)[0], 1e-6 if precision == "32-true" else 2e-2)


def with_experts(mesh, folder):
    window(mesh, ScaledMixture, EXPERTS, UNEVEN)
    window(mesh, ScaledMixture, EXPERTS, UNEVEN, precision="bf16-mixed")
    window(mesh, ScaledMixture, EXPERTS, UNEVEN, passes=2)
    window(mesh, ScaledMixture, EXPERTS, TOGETHER)
    data = data_of(mesh, UNEVEN)
    mine = own_part(mesh, data)
    clip_and_resume(ScaledMixture, data, mine, lambda: strategy_of(mesh, fsdp_plan=EXPERTS), 4, f"{folder}/checkpoint")


@pytest.mark.parametrize("mesh", MESHES)
def test_groups_inside_blocks_equal_one_process(mesh, tmp_path):
    run_on_ranks(WORLD, with_experts, mesh, str(tmp_path), timeout=240)


def compiled(mesh, folder):
    torch._dynamo.reset()
    counters.clear()
    with patch("lightning_chunkmbs.compiled.BACKEND", "aot_eager"):
        window(mesh, Scaled, COMPILED, EVEN)
        graphs = counters["stats"]["unique_graphs"]
        assert 1 <= graphs <= 2, "one for chunks of one sample, one for larger ones"
        window(mesh, Scaled, COMPILED, EVEN, passes=2)
        data = data_of(mesh, EVEN)
        mine = own_part(mesh, data)
        clip_and_resume(Scaled, data, mine, lambda: strategy_of(mesh, fsdp_plan=COMPILED), 4, f"{folder}/checkpoint")
        assert counters["stats"]["unique_graphs"] == graphs
        window(mesh, Scaled, COMPILED, TOGETHER)
        if mesh == "tensor parallel":  # test_compiled.py has this precision without it
            window(mesh, Scaled, COMPILED, EVEN, precision="bf16-mixed")
            assert counters["stats"]["unique_graphs"] > graphs, "nothing is compiled for another precision"
    assert not counters["graph_break"]


@pytest.mark.parametrize("mesh", MESHES)
def test_compiled_blocks_equal_one_process(mesh, tmp_path):
    run_on_ranks(WORLD, compiled, mesh, str(tmp_path), timeout=240)
