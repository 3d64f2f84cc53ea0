"""Lockstep on two processes: stock FSDP2's gradients, counted collectives, blocks that only some ranks need, errors."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tests.collectives import count_collectives
from tests.models import BLOCKS, chunked
from tests.one_window import (
    SIZES,
    Windowed,
    accumulate,
    assert_close,
    build,
    different,
    gradients,
    micro_batches,
    train_window,
)
from tests.ranks import raises_on_ranks, run_on_ranks
from tests.structure_models import Decoder, Images, LateImages, MaskedImages

EMBEDDINGS = {"embedding.weight", "position"}


def data_of_ranks(sizes: list[int], lengths: list[int] | None = None) -> list[list[Tensor]]:
    more = {"lengths": lengths} if lengths else {}
    return [micro_batches(sizes, seed=r, **more) for r in range(dist.get_world_size())]


# -- beside FSDP2's own accumulation ---------------------------------------------------------------------------------


def accumulate_with_fsdp2(net: nn.Module, data: list[Tensor]) -> dict[str, Tensor]:
    """FSDP2 by hand: blocks recomputed, gradients reduced with the last micro-batch only."""
    for layer in net.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        fully_shard(layer)
    fully_shard(net)
    for i, batch in enumerate(data):
        net.set_requires_gradient_sync(i == len(data) - 1)
        (net(batch) / len(data)).backward()
    return gradients(net)


def differing_from_fsdp2(sizes: list[int]) -> tuple[set[str], list[int], float]:
    net, data = build(), data_of_ranks(sizes)[dist.get_rank()]
    module = train_window(deepcopy(net), data, chunked(8))
    expected = accumulate_with_fsdp2(deepcopy(net), data)
    assert_close(module.gradients, expected)
    return different(module.gradients, expected), module.seen.runs, max(g.abs().max() for g in expected.values()).item()


@pytest.mark.parametrize("sizes", [[2, 2, 2, 2], SIZES], ids=["equal", "ragged"])
def test_blocks_are_bit_for_bit_those_of_fsdp2_with_sync_on_the_last_micro_batch(sizes):
    for names, runs, largest in run_on_ranks(2, differing_from_fsdp2, sizes):
        assert names <= EMBEDDINGS
        assert runs == [1]
        assert largest > 1e-2


# -- collectives -----------------------------------------------------------------------------------------------------


def collectives_of(n: int, plan: dict[str, Any]) -> tuple[int, int, list[int]]:
    net, data = build(), data_of_ranks([2] * n)
    with count_collectives() as counted:
        module = train_window(deepcopy(net), data[dist.get_rank()], chunked(1, chunkmbs_plan=plan))
    assert_close(module.gradients, accumulate(net, data)[0])
    assert module.seen.runs == module.seen.autograd
    assert (counted.all_gathers, counted.reduce_scatters) == (module.report.all_gathers, module.report.reduce_scatters)
    assert module.report.chunks == n * 2 * BLOCKS
    return counted.all_gathers, counted.reduce_scatters, module.seen.runs


@pytest.mark.parametrize("n", [1, 2, 8, 32])
def test_collectives_do_not_depend_on_the_number_of_micro_batches(n):
    runs = [] if n == 1 else [1]  # a window of one is an ordinary step
    assert run_on_ranks(2, collectives_of, n, {}) == [(2 * BLOCKS + 1, BLOCKS + 1, runs)] * 2


@pytest.mark.parametrize(("n", "most", "passes"), [(10, 4, 3), (3, 1, 3), (5, 4, 2)])
def test_max_lockstep_takes_passes(n, most, passes):
    # A pass of one micro-batch (max_lockstep 1, or what is left over) is an ordinary one.
    lockstep = [1] * (0 if most == 1 else n // most + (n % most > 1))
    gathers, scatters = passes * (2 * BLOCKS + 1), passes * (BLOCKS + 1)
    assert run_on_ranks(2, collectives_of, n, {"max_lockstep": most}) == [(gathers, scatters, lockstep)] * 2


# -- blocks that only some micro-batches need ------------------------------------------------------------------------

# An even number of samples stands for an image.
IMAGES = {
    "some of one rank": ([2, 3, 4, 1], [1, 3, 3, 1]),
    "some of the other rank": ([1, 3, 3, 1], [3, 2, 1, 4]),
    "other micro-batches of each": ([2, 3, 3, 1], [3, 3, 1, 2]),
    "all of one rank": ([2, 2, 4, 4], [1, 3, 3, 1]),
    "one in a window of two": ([1, 2], [3, 1]),
}


def train_images(
    kind: type[LateImages], sizes_of_ranks: tuple[list[int], ...], keywords: tuple[str, ...] = ()
) -> tuple[int, int, list[int]]:
    net, rank = build(kind), dist.get_rank()
    data = [micro_batches(sizes, seed=r) for r, sizes in enumerate(sizes_of_ranks)]
    plan = {"apply_modules": ["net.layers.{*}", "net.tower.{*}"], "chunk_kwarg_names": list(keywords)}
    module = train_window(deepcopy(net), data[rank], chunked(1, chunkmbs_plan=plan))
    expected, losses = accumulate(net, data)
    assert_close(module.gradients, expected)
    assert [module.losses[i] for i in range(len(data[rank]))] == pytest.approx(losses[rank], abs=1e-6)
    return module.report.all_gathers, module.report.reduce_scatters, module.seen.runs


@pytest.mark.parametrize("case", IMAGES)
def test_a_tower_that_only_some_ranks_need_is_gathered_once_on_all(case):
    blocks = BLOCKS + 2
    results = run_on_ranks(2, train_images, Images, IMAGES[case])
    assert [counts[:2] for counts in results] == [(2 * blocks + 1, blocks + 1)] * 2
    assert all(len(runs) == 1 for *_, runs in results)


@pytest.mark.parametrize("sizes", [([2, 3, 4, 1], [1, 3, 3, 1]), ([1], [2])], ids=["window of four", "of one"])
def test_a_keyword_that_only_the_steps_of_one_rank_give_is_received(sizes):
    blocks = BLOCKS + 2
    results = run_on_ranks(2, train_images, MaskedImages, sizes, ("condition",))
    assert [counts[:2] for counts in results] == [(2 * blocks + 1, blocks + 1)] * 2


def train_without_the_keyword() -> None:
    plan = {"apply_modules": ["net.layers.{*}", "net.tower.{*}"], "chunk_kwarg_names": ["condition"]}
    train_window(build(MaskedImages), data_of_ranks([1, 3])[dist.get_rank()], chunked(1, chunkmbs_plan=plan))


def test_a_keyword_that_no_rank_gives_is_refused_on_all():
    for error, message in raises_on_ranks(2, train_without_the_keyword):
        assert error == "ValueError"
        assert "declares ['condition'], and no block was called with any of them" in message


def test_a_tower_defined_after_the_blocks_costs_a_second_pass():
    # Batches without images go on to the blocks while the others wait at the tower.
    blocks = 2 * BLOCKS + 2
    results = run_on_ranks(2, train_images, LateImages, IMAGES["other micro-batches of each"])
    assert [counts[:2] for counts in results] == [(2 * blocks + 1, blocks + 1)] * 2


def train_without_images() -> tuple[int, int]:
    net, rank = build(Images), dist.get_rank()
    data = data_of_ranks([1, 3, 3, 1])
    plan = {"apply_modules": ["net.layers.{*}", "net.tower.{*}"]}
    module = train_window(deepcopy(net), data[rank], chunked(1, chunkmbs_plan=plan))
    assert_close(module.gradients, accumulate(net, data)[0])
    return module.report.all_gathers, module.report.reduce_scatters


def test_a_tower_that_no_rank_needs_gets_no_gradients():
    gathers, scatters = 2 * BLOCKS + 1, BLOCKS + 1
    for counts in run_on_ranks(2, train_without_images):
        assert counts[0] <= gathers + 2  # prefetched, at most once each
        assert counts[1] == scatters


# -- what cannot be run in lockstep ----------------------------------------------------------------------------------


class Peeking(Decoder):
    """Adds to the loss what a hook has kept from inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None
        self.layers[1].up.register_forward_hook(self.keep)

    def keep(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self.kept = output

    def forward(self, tokens: Tensor) -> Tensor:
        loss = super().forward(tokens)
        return loss + self.kept.square().mean()


class Penalised(Windowed):
    """Takes the gradient of the loss with respect to the embedding, through the blocks."""

    by = "grad"

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.net.embed(batch)
        loss = self.net.loss(self.net.run(x), batch)
        if self.by == "backward":
            loss.backward(retain_graph=True)
        else:
            torch.autograd.grad(loss, x, create_graph=self.by == "double")
        return loss


def train_peeking() -> None:
    train_window(build(Peeking), data_of_ranks(SIZES)[dist.get_rank()])


def train_penalised(by: str) -> None:
    module = Penalised(build())
    module.by = by
    train_window(module, data_of_ranks(SIZES)[dist.get_rank()])


def test_a_loss_that_reaches_the_inside_of_a_block_is_refused_by_its_name():
    for kind, message in raises_on_ranks(2, train_peeking):
        assert kind == "RuntimeError"
        assert "net.layers.1" in message
        assert "net.layers.0" not in message
        assert "max_lockstep: 1" in message


@pytest.mark.parametrize("by", ["grad", "double", "backward"])
def test_autograd_through_a_block_inside_a_step_is_refused(by):
    for kind, message in raises_on_ranks(2, train_penalised, by):
        assert kind == "RuntimeError"
        assert f"torch.autograd.{'backward' if by == 'backward' else 'grad'}" in message
        assert "max_lockstep: 1" in message


class InnerGradient(Windowed):
    """Takes a gradient that stays behind the last block."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.net.run(self.net.embed(batch)).detach().requires_grad_()
        torch.autograd.grad(self.net.loss(x, batch), x)
        return super().training_step(batch, batch_idx)


def train_inner_gradient() -> None:
    net, data = build(), data_of_ranks(SIZES)
    module = train_window(InnerGradient(deepcopy(net)), data[dist.get_rank()])
    assert len(module.seen.runs) == 1
    assert_close(module.gradients, accumulate(net, data)[0])


def test_autograd_that_goes_through_no_block_is_allowed():
    run_on_ranks(2, train_inner_gradient)
