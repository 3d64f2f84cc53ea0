"""Losses over more than one sample or forward pass: in-batch negatives, and preferences beside a frozen reference."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from tests.collectives import count_collectives
from tests.model_zoo import NO_DROPOUT, SIZES, TOKENS, batch, build
from tests.models import chunked
from tests.one_window import accumulate, assert_close, train_window
from tests.ranks import run_on_ranks

# -- in-batch negatives ------------------------------------------------------------------------------------------------


def text_encoder() -> BertModel:
    return BertModel(BertConfig(**SIZES | TOKENS | NO_DROPOUT), add_pooling_layer=False)


def embed(encoder: nn.Module, texts: dict[str, Tensor]) -> Tensor:
    """Normalised mean of the hidden states that are no padding."""
    hidden = encoder(**texts).last_hidden_state
    mask = texts["attention_mask"].unsqueeze(-1)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


class TwoTowers(nn.Module):
    """Every question with its own answer and, as negatives, with all others of the batch."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.questions = text_encoder()
        self.answers = self.questions if shared else text_encoder()

    def forward(self, pairs: tuple[dict[str, Tensor], dict[str, Tensor]]) -> Tensor:
        questions, answers = embed(self.questions, pairs[0]), embed(self.answers, pairs[1])
        return F.cross_entropy(questions @ answers.T * 20, torch.arange(len(questions)))


def texts(size: int, length: int, seed: int) -> dict[str, Tensor]:
    return {key: value for key, value in batch("bert", size, length, seed).items() if key != "labels"}


def train_contrastive(shared: bool) -> tuple[int, int, int]:
    rank, net = dist.get_rank(), TwoTowers(shared).train()
    data = [[(texts(size, 5, size), texts(size, 7, size + 1))] for size in (7, 4)]
    towers = ["questions.encoder.layer.{*}"] + ([] if shared else ["answers.encoder.layer.{*}"])
    plan = {"apply_modules": towers, "chunk_arg_indexs": [0, 1]}
    with count_collectives() as counted:
        module = train_window(deepcopy(net), data[rank], chunked(2, chunkmbs_plan=plan))
    assert_close(module.gradients, accumulate(net, data)[0])
    assert module.report.offloaded_bytes > 0
    return counted.all_gathers, counted.reduce_scatters, module.report.chunks


@pytest.mark.parametrize(
    ("shared", "gathers", "scatters"), [(False, 9, 5), (True, 9, 3)], ids=["two towers", "one tower twice"]
)
def test_negatives_come_from_the_whole_batch_while_the_towers_cut_it(shared: bool, gathers: int, scatters: int) -> None:
    results = run_on_ranks(2, train_contrastive, shared)
    assert [result[2] for result in results] == [4 * 4, 4 * 2]  # two passes of two blocks
    assert [result[:2] for result in results] == [(gathers, scatters)] * 2


# -- preferences -------------------------------------------------------------------------------------------------------


class Preferences(nn.Module):
    """DPO: what the policy prefers of two answers, beside what a frozen reference does."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = build("qwen3"), build("qwen3", initializer_range=0.1)
        self.reference.requires_grad_(False).eval()

    def forward(self, pair: tuple[dict[str, Tensor], dict[str, Tensor]]) -> Tensor:
        chosen, rejected = (log_likelihood(self.policy, one) for one in pair)
        with torch.no_grad():
            chosen_before, rejected_before = (log_likelihood(self.reference, one) for one in pair)
        return -F.logsigmoid(0.1 * (chosen - rejected - chosen_before + rejected_before)).mean()


def log_likelihood(model: nn.Module, one: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=one["input_ids"], attention_mask=one["attention_mask"]).logits
    labels = one["labels"][:, 1:]
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (chosen * (labels != -100)).sum(-1)


def train_preferences(n: int) -> tuple[Any, ...]:
    rank, net = dist.get_rank(), Preferences()
    data = [
        [tuple(batch("qwen3", 1 + (i + r) % 3, 6 + i + k, 20 * r + 2 * i + k) for k in range(2)) for i in range(n)]
        for r in range(2)
    ]
    models = ["policy.model.layers.{*}", "reference.model.layers.{*}"]
    plan = {"apply_modules": models, "chunk_kwarg_names": ["position_embeddings", "attention_mask"]}
    with count_collectives() as counted:
        module = train_window(deepcopy(net), data[rank], chunked(2, chunkmbs_plan=plan))
    expected, losses = accumulate(net, data)
    assert_close(module.gradients, expected)
    assert all(name.startswith("policy.") for name in expected)
    assert [module.losses[i] for i in range(n)] == pytest.approx(losses[rank], abs=1e-6)
    return counted.all_gathers, counted.reduce_scatters


def test_two_forwards_of_policy_and_reference_cost_no_more_with_more_micro_batches() -> None:
    # Two blocks, each called twice: gathered forward and backward, and reduced; two of the reference; the root.
    assert [run_on_ranks(2, train_preferences, n) for n in (2, 4)] == [[(4 + 4 + 4 + 1, 4 + 1)] * 2] * 2
