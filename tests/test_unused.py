"""Parameters that some ranks do not use: reduced as zeros there, and without gradient where nobody uses them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests import expert_models
from tests.expert_models import LONG, Mixture
from tests.models import BLOCKS, VOCABULARY, WIDTH, Block, chunked, fit
from tests.one_window import Windowed, accumulate, assert_close, build, gradients, train_window
from tests.ranks import count_collectives, run_on_ranks
from tests.structure_models import Decoder


class TwoHeads(Decoder):
    """Short sequences are of another task, which has a head of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        head = self.head if tokens.shape[1] >= LONG else self.other
        return F.cross_entropy(head(self.norm(x))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Spare(Block):
    """With a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


class SomeTower(Decoder):
    """Only sequences of LONG call the tower; ranks without one take part in its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(Spare() for _ in range(2))

    def embed(self, tokens: Tensor) -> Tensor:
        x = y = super().embed(tokens)
        for block in self.tower if tokens.shape[1] >= LONG else []:
            y = block(y.sin())
        return x + y


KINDS: dict[str, Any] = {**vars(expert_models), "TwoHeads": TwoHeads, "SomeTower": SomeTower}
# Of each micro-batch of each rank its samples and their length; only those of LONG use experts or the first head.
APART = [[(2, 8), (3, 7)], [(1, 5), (2, 5)]]
SOME = [[(2, 8), (2, 7)], [(2, 8), (2, 5)]]
NOBODY = [[(2, 5), (3, 6)], [(3, 5), (1, 6)]]
CUT = [[(6, 8)], [(2, 6)]]


def data_of(shapes: list[list[tuple[int, int]]]) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randint(VOCABULARY, shape, generator=generator) for shape in rank] for rank in shapes]


def train_apart(kind: str, shapes: list[list[tuple[int, int]]], options: dict[str, Any]) -> tuple[int, set[str]]:
    """Reduce-scatters of a window whose gradients, and the names of what has one, are those of one process."""
    net, data, rank = build(KINDS[kind]), data_of(shapes), dist.get_rank()
    with count_collectives() as counted:
        module = train_window(Windowed(deepcopy(net)), data[rank], chunked(1, **options))
    assert module.report.chunks > 0 or "enable_chunk_mbs" in options
    expected, _ = accumulate(net, data)
    assert_close(module.gradients, expected)
    return counted.reduce_scatters, {name for name, _ in net.named_parameters()} - expected.keys()


ONCE = BLOCKS + 1


@pytest.mark.parametrize("shapes", [APART, SOME, NOBODY, CUT], ids=["apart", "some", "nobody", "cut"])
@pytest.mark.parametrize("kind", ["Mixture", "TwoHeads"])
def test_what_only_some_ranks_use(kind, shapes):
    for reduced, without in run_on_ranks(2, train_apart, kind, shapes, {}):
        assert reduced == ONCE
        unused = {"Mixture": "layers.0.experts.each.0.weight", "TwoHeads": "head.weight"}[kind]
        assert (unused in without) == (shapes is NOBODY)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("shapes", [APART, SOME], ids=["apart", "some"])
def test_taking_part_in_a_call_of_other_ranks_is_no_use(shapes, passes):
    plan = {"apply_modules": ["net.layers.{*}", "net.tower.{*}"], "max_lockstep": 2 // passes}
    (reduced, without), other = run_on_ranks(2, train_apart, "SomeTower", shapes, {"chunkmbs_plan": plan})
    assert without == {f"tower.{i}.spare.{name}" for i in range(2) for name in ("weight", "bias")}
    assert (reduced, without) == other
    assert reduced >= passes * ONCE + 2, "the tower was not called"


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("CodeBetweenExperts", {}, ONCE),
        ("RepeatedExperts", {}, ONCE),
        ("FrozenInput", {}, ONCE),
        ("Mixture", {"chunkmbs_plan": {"max_lockstep": 1}}, 2 * ONCE),
        ("TwoHeads", {"chunkmbs_plan": {"max_lockstep": 1}}, 2 * ONCE),
        ("TwoHeads", {"enable_chunk_mbs": False}, 2 * ONCE),
    ],
)
def test_however_steps_run(kind, options, expected):
    assert [reduced for reduced, _ in run_on_ranks(2, train_apart, kind, APART, options)] == [expected] * 2


@pytest.mark.parametrize("options", [{}, {"apply_modules": ["net.layers.{*}.experts"]}], ids=["whole", "nested"])
def test_replicas(options):
    plan = {"fsdp_plan": {"replicate_size": 2, **options}}
    run_on_ranks(4, train_apart, "Mixture", APART + SOME, plan)


def momentum() -> None:
    """What nobody uses is left alone by an optimizer that would move it: in a block, beside one and nested."""
    for options in ({}, {"fsdp_plan": {"apply_modules": ["net.layers.{*}.experts"]}}):
        data = [[*some, *none] for some, none in zip(data_of(SOME), data_of(NOBODY), strict=True)]
        net, rank = build(Mixture), dist.get_rank()
        module = Decaying(deepcopy(net))
        fit(module, data[rank], chunked(1, **options), accumulate_grad_batches=2)
        optimizer = Decaying(net).configure_optimizers()
        for start in (0, 2):
            optimizer.zero_grad()
            accumulate(net, [batches[start : start + 2] for batches in data])
            optimizer.step()
        assert not any("experts" in name for name in gradients(net))
        ours = {name: p.full_tensor() for name, p in module.net.named_parameters()}
        assert_close({n: p.detach() for n, p in ours.items()}, {n: p.detach() for n, p in net.named_parameters()}, 2e-6)


class Decaying(Windowed):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)


def test_what_nobody_uses_does_not_move():
    run_on_ranks(2, momentum)
