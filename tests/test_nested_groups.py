"""Groups inside blocks (experts): gathered once per pass, on every rank, whatever its chunks do."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests import expert_models as models
from tests.collectives import count_collectives
from tests.expert_models import Mixture, OwnGroups
from tests.models import BLOCKS, LAYERS, VOCABULARY, Loader, chunked, fit, full, make_trainer
from tests.one_window import Windowed, accumulate, assert_close, build, train_window
from tests.ranks import raises_on_ranks, run_on_ranks

EXPERTS = {"fsdp_plan": {"apply_modules": ["net.layers.{*}.experts"]}}
EACH = {"fsdp_plan": {"apply_modules": ["net.layers.{*}.experts", "net.layers.{*}.experts.each.{*}"]}}
STREAMED = {"activation_offload_plan": {"apply_modules": [LAYERS], "stream_hidden_states": True}}
# Of each micro-batch of each rank its samples and their length.
ALIKE = [[(4, 8)] * 2] * 2
MORE_CHUNKS = [[(4, 8), (1, 7), (4, 5)], [(1, 8), (1, 5), (1, 7)]]
ONE_WITHOUT = [[(3, 8), (4, 7)], [(1, 5), (3, 6)]]  # the second rank never calls an expert
TOGETHER = [[(6, 8)], [(2, 6)]]  # one batch, cut
GROUPS = 2 * BLOCKS + 1
ONCE = (2 * GROUPS - 1, GROUPS)  # all-gathers, reduce-scatters


def data_of(shapes: list[list[tuple[int, int]]]) -> list[list[Any]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randint(VOCABULARY, shape, generator=generator) for shape in rank] for rank in shapes]


def train_experts(
    kind: str, shapes: list[list[tuple[int, int]]], options: dict[str, Any], own: bool = False
) -> tuple[int, int]:
    net, data, rank = build(getattr(models, kind)), data_of(shapes), dist.get_rank()
    wrapped = (OwnGroups if own else Windowed)(deepcopy(net))
    with count_collectives() as counted:
        module = train_window(wrapped, data[rank], chunked(1, **({} if own else EXPERTS) | options))
    expected, losses = accumulate(net, data)
    assert_close(module.gradients, expected)
    assert [module.losses[i] for i in range(len(data[rank]))] == pytest.approx(losses[rank], abs=1e-6)
    assert any("experts" in name for name in expected) or kind == "FrozenExperts", "no expert was called"
    assert any(len(batch) > 1 for batches in data for batch in batches), "nothing is cut"
    assert (counted.all_gathers, counted.reduce_scatters) == (module.report.all_gathers, module.report.reduce_scatters)
    return counted.all_gathers, counted.reduce_scatters


@pytest.mark.parametrize("shapes", [ALIKE, MORE_CHUNKS, ONE_WITHOUT, TOGETHER], ids=lambda s: f"{s[0]}-{s[1]}")
def test_experts_are_gathered_once_per_pass_and_reduced_once(shapes):
    assert run_on_ranks(2, train_experts, "Mixture", shapes, {}) == [ONCE] * 2


@pytest.mark.parametrize("shapes", [MORE_CHUNKS, ONE_WITHOUT, TOGETHER], ids=["more", "without", "cut"])
def test_experts_that_the_module_shards_itself(shapes):
    assert run_on_ranks(2, train_experts, "Mixture", shapes, {}, True) == [ONCE] * 2


# FSDP2 reduces what a second call of a block in the same graph leaves to the first: experts with zeros, for all ranks.
TWICE = (4 * 2 * BLOCKS + 1, 2 * GROUPS - 1)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("FrozenExperts", {}, (2 * GROUPS - 1, BLOCKS + 1)),
        ("FrozenInput", {}, ONCE),
        ("CodeBetweenExperts", {}, ONCE),
        ("RepeatedExperts", {}, TWICE),
        ("Mixture", STREAMED, ONCE),
        ("Mixture", {"chunkmbs_plan": {"max_lockstep": 1}}, (2 * (2 * GROUPS - 1), 2 * GROUPS)),
        ("Mixture", {"fsdp_plan": {**EXPERTS["fsdp_plan"], "reshard_after_forward": False}}, (GROUPS, GROUPS)),
        ("Mixture", EACH, (2 * (BLOCKS + 9) + 1, BLOCKS + 9 + 1)),
    ],
)
def test_experts_of_which_one_rank_calls_none(kind, options, expected):
    assert run_on_ranks(2, train_experts, kind, ONE_WITHOUT, options) == [expected] * 2


def test_a_tower_with_experts_that_one_rank_does_not_call():
    options = {
        "chunkmbs_plan": {"apply_modules": [LAYERS, "net.tower.{*}"]},
        "fsdp_plan": {"apply_modules": ["net.tower.{*}.experts"]},
    }
    shapes = [[(2, 8), (1, 5), (4, 7)], [(1, 8), (3, 6), (1, 7)]]  # an image has an even number of samples
    blocks, experts = BLOCKS + 2, 2
    expected = (2 * (blocks + experts) + 1, blocks + experts + 1)
    assert run_on_ranks(2, train_experts, "ImagesWithExperts", shapes, options) == [expected] * 2


def resumed(path: str) -> float:
    """Two epochs at once, and the second one in a new run from the first one's checkpoint."""
    data = data_of([[(3, 8), (4, 5)], [(2, 5), (1, 6)]])[dist.get_rank()]
    whole, first, second = (Windowed(build(Mixture)) for _ in range(3))
    fit(whole, data, chunked(1, **EXPERTS), max_epochs=2)
    fit(first, data, chunked(1, **EXPERTS)).save_checkpoint(path)
    trainer = make_trainer(chunked(1, **EXPERTS), max_epochs=2)
    trainer.fit(second, Loader(data), ckpt_path=path)
    assert second.state_dict().keys() == Windowed(build(Mixture)).state_dict().keys()
    return max(
        (full(a) - full(b)).abs().max().item() for a, b in zip(whole.parameters(), second.parameters(), strict=True)
    )


def test_a_checkpoint_resumes(tmp_path):
    assert run_on_ranks(2, resumed, str(tmp_path / "checkpoint")) == [0, 0]


def reduced_in_bf16(plan: dict[str, Any]) -> tuple[dict[str, torch.Tensor], set[torch.dtype]]:
    dtypes: set[torch.dtype] = set()
    data = data_of([[(12, 8)] * 2] * 2)[dist.get_rank()]
    with count_collectives(on_reduce=lambda tensor: dtypes.add(tensor.dtype)):
        module = train_window(build(Mixture), data, chunked(1, **plan), precision="bf16-mixed")
    return module.gradients, dtypes


def same_in_bf16() -> float:
    (nested, dtypes), (whole, _) = reduced_in_bf16(EXPERTS), reduced_in_bf16({})
    assert dtypes == {torch.float32}
    assert any("experts" in name for name in nested)
    return max((nested[name] - whole[name]).abs().max().item() for name in whole)


def test_gradients_in_bf16_are_added_up_as_those_of_the_block():
    """Bit for bit what experts in the block's own group get, which test_precision_numbers bounds."""
    assert run_on_ranks(2, same_in_bf16) == [0, 0]


class Validated(Windowed):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses[100 + self.global_step] = self.net(batch).item()


def several_steps() -> float:
    """Two steps, with passes without gradients between; what the shards of experts hold is never stale."""
    data, rank = data_of([[(3, 8), (4, 5)], [(2, 5), (1, 6)]]), dist.get_rank()
    module, plain = Validated(build(Mixture)), build(Mixture)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    fit(module, data[rank], chunked(1, **EXPERTS), val_check_interval=1)
    differences = []
    for step in range(2):
        optimizer.zero_grad()
        torch.stack([plain(batches[step]) for batches in data]).mean().backward()
        optimizer.step()
        differences.append(abs(plain(data[rank][0]).item() - module.losses[100 + step + 1]))
    return max(differences)


def test_several_steps_with_validation():
    assert max(run_on_ranks(2, several_steps)) < 1e-6


def shared_experts() -> None:
    train_window(build(models.SharedExperts), data_of(ALIKE)[0], chunked(1, **EXPERTS))


def block_sharded_before() -> None:
    train_window(BlockFirst(build(Mixture)), data_of(ALIKE)[0], chunked(1, **EXPERTS))


class BlockFirst(Windowed):
    def configure_model(self) -> None:
        fully_shard(self.net.layers[0], mesh=self.device_mesh["data_parallel"])


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (
            shared_experts,
            r"that of the block 'net\.layers\.\d' is used as 'net\.layers\.\d\.experts' too\. Take it out",
        ),
        (block_sharded_before, r"group inside the block 'net\.layers\.0', .*Delete the fully_shard\(\.\.\.\) call"),
    ],
)
def test_what_cannot_be_a_group_inside_a_block(fn, message):
    for error, text in raises_on_ranks(2, fn):
        assert error == "ValueError"
        assert re.search(message, text), text
