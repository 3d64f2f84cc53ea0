"""compile_blocks: what a block does for one chunk is compiled once per class, and nothing else changes."""

from unittest.mock import patch

import pytest
import torch
from torch._dynamo.utils import counters

from lightning_chunkmbs import ChunkMBSStrategy
from lightning_chunkmbs.block import run_idle_block
from lightning_chunkmbs.compiled import CompiledForwards
from tests.mesh_models import clip_and_resume
from tests.models import Block, chunked, fit
from tests.one_window import Windowed, accumulate, assert_close, build, micro_batches, train_window
from tests.ranks import count_collectives, run_on_ranks
from tests.structure_models import Decoder, Images


class Counting(Windowed):
    """Notes how many graphs exist after each step."""

    def __init__(self, net):
        super().__init__(net)
        self.graphs = []

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        self.graphs.append(counters["stats"]["unique_graphs"])


def data_of(rank):
    return micro_batches([4, 4], [6], seed=rank)


def compiled(backend, precision, blocks):
    torch._dynamo.reset()
    counters.clear()
    rank, plan = torch.distributed.get_rank(), {"compile_blocks": True}
    with patch("lightning_chunkmbs.compiled.BACKEND", backend):
        module = Counting(build(Decoder, blocks))
        with count_collectives() as counted:
            fit(module, data_of(rank), chunked(2, fsdp_plan=plan), accumulate_grad_batches=2, precision=precision)
        assert (counted.all_gathers, counted.reduce_scatters) == (2 * blocks + 1, blocks + 1)
        again = Counting(build(Decoder, blocks))
        fit(again, data_of(rank), chunked(2, fsdp_plan=plan), accumulate_grad_batches=2, max_epochs=3)
    assert 0 < module.graphs[0] <= 4
    assert len(set(again.graphs)) == 1  # shapes are the same in every step
    assert not counters["graph_break"]
    assert list(module.net.state_dict()) == list(Decoder(blocks).state_dict())
    plain = train_window(build(Decoder, blocks), data_of(rank), chunked(2), precision=precision)
    assert_close(module.gradients, plain.gradients, 1e-6 if precision == "32-true" else 1e-2)
    expected, _ = accumulate(build(Decoder, blocks), [data_of(0), data_of(1)])
    assert_close(module.gradients, expected, 1e-6 if precision == "32-true" else 3e-2)
    return module.graphs + again.graphs


class ScaledBlock(Block):
    """With a 0-dim parameter inside, which FSDP2 does not gather."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.9))

    def forward(self, x):
        return self.scale * super().forward(x)


class ScaledBlocks(Decoder):
    def __init__(self):
        super().__init__(block=ScaledBlock)


def uneven(kind, towers, max_lockstep, folder):
    """Windows of four micro-batches of different sizes and lengths: graphs for any shape are made on the way."""
    torch._dynamo.reset()
    counters.clear()
    rank, sizes = torch.distributed.get_rank(), [[4, 1, 2, 6], [3, 1, 5, 1]]
    data = [micro_batches(s, [6, 8, 5, 7], seed=i) for i, s in enumerate(sizes)]
    plan = {"apply_modules": towers, "max_lockstep": max_lockstep}
    idle = patch("lightning_chunkmbs.lockstep.run_idle_block", wraps=run_idle_block)
    with patch("lightning_chunkmbs.compiled.BACKEND", "aot_eager"), idle as idled:
        module = clip_and_resume(
            kind,
            data,
            data[rank],
            lambda: chunked(2, chunkmbs_plan=plan, fsdp_plan={"compile_blocks": True}),
            4,
            f"{folder}/checkpoint",
        )
    assert counters["stats"]["unique_graphs"] == 2, "one for one sample, one for more"
    return module.report.all_gathers, idled.called


# Images: only batches with an even number of samples need the tower, so the second rank never does.
@pytest.mark.parametrize(
    ("kind", "towers", "max_lockstep", "gathers", "idle"),
    [
        (ScaledBlocks, ["net.layers.{*}"], 3, 14, [False, False]),  # two passes
        (Images, ["net.tower.{*}", "net.layers.{*}"], 4, 11, [False, True]),
    ],
)
def test_uneven_chunks_share_graphs(kind, towers, max_lockstep, gathers, idle, tmp_path):
    ran = run_on_ranks(2, uneven, kind, towers, max_lockstep, str(tmp_path), timeout=240)
    assert ran == [(gathers, i) for i in idle]


# torch gives up, silently, after eight graphs of one function: there are more blocks than that.
@pytest.mark.parametrize(("precision", "blocks"), [("32-true", 12), ("bf16-mixed", 3)])
def test_blocks_are_compiled_once_per_class(precision, blocks):
    run_on_ranks(2, compiled, "aot_eager", precision, blocks)


def test_inductor():
    run_on_ranks(2, compiled, "inductor", "32-true", 2)


def test_a_forward_of_an_instance_is_refused():
    block = Block()
    block.forward = lambda x: x
    with pytest.raises(TypeError, match="compiles the forward of a block's class, and a has a forward of its own"):
        CompiledForwards().of("a", block)


def test_save_ops_are_refused():
    strategy = ChunkMBSStrategy(
        chunkmbs_plan={"apply_modules": ["a"]},
        recompute_plan={"apply_modules": ["a"], "save_ops": ["aten.mm"]},
        fsdp_plan={"compile_blocks": True},
    )
    with pytest.raises(ValueError, match="save_ops keeps results of single operators.*compile_blocks is true"):
        strategy._declared.plans_for(torch.nn.Module())
