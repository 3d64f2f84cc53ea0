"""Adapters, frozen parts and tied embeddings of Hugging Face models, on two processes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.collectives import count_collectives
from tests.model_zoo import build, init_args, strategy, window
from tests.models import chunked
from tests.one_window import Windowed, accumulate, assert_close, train_window
from tests.ranks import raises_on_ranks, run_on_ranks

SIZES = ([3, 1, 2, 3], [2, 4, 1, 1])  # samples of each micro-batch, of each rank


def lora(name: str, **config: Any) -> nn.Module:
    """A model with adapters; everything else is frozen."""
    torch.manual_seed(2)
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(build(name, **config), adapters)


def frozen_embedding(name: str) -> nn.Module:
    net = build(name)
    net.get_input_embeddings().requires_grad_(False)
    return net


def half_frozen(name: str) -> nn.Module:
    """The embedding and the first layer are frozen."""
    net = frozen_embedding(name)
    net.model.layers[0].requires_grad_(False)
    return net


def backbone_frozen(name: str) -> nn.Module:
    """Only the head trains."""
    net = build(name)
    net.model.requires_grad_(False)
    return net


# How the model is made, and what a step of two blocks gathers and reduces. A group is reduced where it trains, and no
# block is gathered for a backward pass that does not come near it.
FROZEN = {
    "adapters": (lora, "base_model.model.model.layers.{*}", (5, 2)),
    "frozen embedding": (frozen_embedding, "model.layers.{*}", (5, 3)),
    "frozen embedding and layer": (half_frozen, "model.layers.{*}", (4, 2)),
    "frozen backbone": (backbone_frozen, "model.layers.{*}", (3, 1)),
}


class Adam(Windowed):
    """With an optimizer that is given all parameters and keeps state."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_end(self) -> None:
        names = {parameter: name for name, parameter in self.net.named_parameters()}
        self.with_state = {names[p] for p in self.trainer.optimizers[0].state}


def train_frozen(case: str) -> tuple[int, int]:
    make, pattern, _ = FROZEN[case]
    rank, net = dist.get_rank(), make("qwen3")
    data = [window("qwen3", sizes, seed=r) for r, sizes in enumerate(SIZES)]
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    plan = {"apply_modules": [pattern]}
    with count_collectives() as counted:
        module = train_window(
            Adam(deepcopy(net)),
            data[rank],
            strategy("qwen3", **plan) if case != "adapters" else _lora_strategy(plan),
        )
    trainable = {name for name, p in net.named_parameters() if p.requires_grad}
    assert module.gradients.keys() == trainable == module.with_state
    assert_close(module.gradients, accumulate(net, data)[0])
    for name, parameter in module.net.named_parameters():
        moved = not torch.equal(parameter.full_tensor(), before[name])
        assert moved == (name in trainable), name
    assert module.report.chunks == 2 * sum(-(-size // 2) for size in SIZES[rank])
    return counted.all_gathers, counted.reduce_scatters


def _lora_strategy(plan: dict[str, Any]) -> Any:
    """The file's plan with the names that peft gives."""
    return chunked(2, chunkmbs_plan=init_args("qwen3")["chunkmbs_plan"] | plan)


@pytest.mark.parametrize("case", FROZEN)
def test_what_is_frozen_has_no_gradient_and_no_state_and_costs_no_more(case: str) -> None:
    assert run_on_ranks(2, train_frozen, case) == [FROZEN[case][2]] * 2


# -- tied embeddings ---------------------------------------------------------------------------------------------------

TIED = {
    "qwen3": ["lm_head.weight", "model.embed_tokens.weight"],
    "gpt2": ["lm_head.weight", "transformer.wte.weight"],
    "t5": ["lm_head.weight", "shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"],
}


def train_tied(name: str, further: list[str]) -> int:
    rank, net = dist.get_rank(), build(name, tie_word_embeddings=True)
    data = [window(name, sizes[:2], seed=r) for r, sizes in enumerate(SIZES)]
    arguments = init_args(name) | {"fsdp_plan": {"apply_modules": further} if further else None}
    module = train_window(deepcopy(net), data[rank], chunked(2, **arguments))
    assert_close(module.gradients, accumulate(net, data)[0])
    tied = [module.net.get_parameter(parameter) for parameter in TIED[name]]
    assert isinstance(tied[0], DTensor)
    assert all(parameter is tied[0] for parameter in tied)
    return module.report.all_gathers


@pytest.mark.parametrize(
    ("name", "further", "gathers"),
    [("qwen3", [], 5), ("gpt2", [], 5), ("t5", [], 9), ("gpt2", ["net"], 6)],
    ids=["qwen3", "gpt2", "t5", "gpt2 as a group"],
)
def test_tied_embeddings_stay_tied_in_one_group(name: str, further: list[str], gathers: int) -> None:
    assert set(run_on_ranks(2, train_tied, name, further)) <= {gathers, gathers - 1}


@pytest.mark.parametrize(
    ("name", "further", "names"),
    [
        ("gpt2", "net.transformer", ["net.transformer.wte.weight", "net.lm_head.weight", "the root group"]),
        ("t5", "net.decoder", ["net.shared.weight", "net.decoder.embed_tokens.weight"]),
    ],
)
def test_tied_embeddings_in_two_groups_are_refused_with_both_names(name: str, further: str, names: list[str]) -> None:
    for kind, message in raises_on_ranks(2, train_tied, name, [further]):
        assert kind == "ValueError"
        assert all(f"'{n}'" in message or f"in {n}" in message for n in names), message
