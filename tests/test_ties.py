"""Blocks whose inputs need no gradient: reduced and freed when their own backward is over."""

from __future__ import annotations

from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from lightning_chunkmbs.ties import knots_for, tie
from tests.collectives import count_collectives
from tests.models import Block, chunked
from tests.one_window import Windowed, accumulate, assert_close, build, micro_batches, train_window
from tests.ranks import run_on_ranks
from tests.structure_models import TwoTowers

LAYERS, TOWER = "net.layers.{*}", "net.tower.{*}"


class Beside(TwoTowers):
    """Two towers over frozen embeddings that meet in the loss; the second is back-propagated first."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.embedding, self.patches):
            part.requires_grad_(False)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.run(self.embed(tokens))
        return self.loss(x + self.see(tokens).mean(1, keepdim=True), tokens)


def events_of_backward(sizes: list[int]) -> tuple[list[str], float]:
    """Recomputations of blocks and reductions of their groups, in order, once each."""
    net = build(Beside)
    module, events = Windowed(deepcopy(net)), []
    names = {id(block): name for name, block in module.net.named_modules() if isinstance(block, Block)}
    forward, post_backward = Block.forward, FSDPParamGroup.post_backward

    def note(event: str) -> None:
        if torch._C._current_graph_task_id() != -1 and event not in events:
            events.append(event)

    def noting_forward(self: Block, x: Tensor) -> Tensor:
        note(f"recompute {names[id(self)]}")
        return forward(self, x)

    def noting_post_backward(self: FSDPParamGroup, *args: Any) -> None:
        # At the end of every run of autograd FSDP2 asks all groups, most of which have nothing to reduce.
        if any(hasattr(p, "_unsharded_param") and p._unsharded_param.grad is not None for p in self.fsdp_params):
            note(f"reduce {names.get(id(self.modules[0]), 'root')}")
        post_backward(self, *args)

    plan = {"apply_modules": [LAYERS, TOWER]}
    data = micro_batches(sizes)
    with (
        patch.object(Block, "forward", noting_forward),
        patch.object(FSDPParamGroup, "post_backward", noting_post_backward),
    ):
        train_window(module, data, chunked(2, chunkmbs_plan=plan))
    expected, _ = accumulate(net, [data])
    assert_close(module.gradients, expected)
    return events, max((module.gradients[n] - g).abs().max().item() for n, g in expected.items())


@pytest.mark.parametrize("sizes", [[5], [5, 1, 3]])
def test_each_block_is_reduced_before_the_next_is_recomputed(sizes):
    [(events, error)] = run_on_ranks(1, events_of_backward, sizes)
    assert error < 1e-6
    towers = ["tower.1", "tower.0", "layers.2", "layers.1", "layers.0"]
    in_order = [f"{what} {name}" for name in towers for what in ("recompute", "reduce")]
    assert [event for event in events if event != "reduce root"] == in_order


def collectives_of_a_step() -> tuple[int, int]:
    with count_collectives() as counted:
        train_window(build(Beside), micro_batches([4, 3]), chunked(1, chunkmbs_plan={"apply_modules": [LAYERS, TOWER]}))
    return counted.all_gathers, counted.reduce_scatters


def test_collectives_are_as_few_as_ever():
    assert run_on_ranks(2, collectives_of_a_step) == [(11, 6)] * 2


def test_knots_only_where_no_input_needs_a_gradient():
    block, ids, hidden = torch.nn.Linear(2, 2), torch.tensor([1]), torch.ones(2, requires_grad=True)
    assert len(knots_for(block, [ids])) == 1
    assert knots_for(block, [ids, hidden]) == []
    with torch.no_grad():
        assert knots_for(block, [ids]) == []


def test_a_tied_output_is_what_it_was_and_may_be_written_in_place():
    knots = knots_for(torch.nn.Linear(2, 2), [])
    x = torch.ones(3, requires_grad=True)
    tied, mask = tie(knots, (x * 2, torch.ones(3)))
    assert not mask.requires_grad
    tied.mul_(3)
    tied.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 6.0))
    assert knots[0].grad is not None
