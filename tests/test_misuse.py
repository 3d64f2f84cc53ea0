"""Mistakes in a script: each one clear error, the same on every rank, before the model is gathered for a step.

Others are beside what they are about: plans and their fields in ``test_plans.py``, what they match and cover in
``test_patterns.py`` and ``test_plans_applied.py``, arguments of the strategy in ``test_strategy.py``, loaders in
``test_uneven_data.py``.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tests.ranks import count_collectives, raises_on_ranks
from tests.strategy_models import (
    LAYERS,
    Toy,
    build,
    chunked,
    fit,
)


class EarlyOptimizer(Toy):
    """Builds its optimizer in ``__init__``, on parameters that sharding replaces."""

    def __init__(self):
        super().__init__()
        self.early = torch.optim.AdamW(self.parameters(), lr=1e-2)

    def configure_optimizers(self):
        return self.early


class OneEarlyGroup(Toy):
    """Adds one early parameter to an optimizer that is otherwise right."""

    def __init__(self):
        super().__init__()
        self.kept = [self.model.head.weight]

    def configure_optimizers(self):
        return torch.optim.AdamW([{"params": self.parameters()}, {"params": self.kept}], lr=1e-2)


class AddsInConfigureOptimizers(Toy):
    def configure_optimizers(self):
        self.extra = nn.Linear(2, 2)
        return super().configure_optimizers()


class ReplacesTheHead(Toy):
    def on_train_start(self):
        self.model.head = nn.Linear(8, 2)


class AddsAScalar(Toy):
    def on_train_start(self):
        self.scale = nn.Parameter(torch.tensor(1.0))


def train(kind, plan, n):
    """Fit, and see to it that an error comes before anything is gathered."""
    with count_collectives() as counted:
        try:
            fit(build(kind), chunked(chunkmbs_plan={"apply_modules": [LAYERS], **plan}), accumulate_grad_batches=n)
        finally:
            assert counted.all_gathers == counted.reduce_scatters == 0


def refused(fn, *args):
    """The one error that both ranks raise."""
    errors = raises_on_ranks(2, fn, *args)
    assert errors[0] == errors[1]
    return errors[0]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            EarlyOptimizer,
            r"holds 18 others \(the first of shape \(8, 4\)\): sharding has replaced.*configure_optimizers",
        ),
        (OneEarlyGroup, r"holds 1 others \(the first of shape \(2, 8\)\)"),
        (AddsInConfigureOptimizers, r"2 parameters were made or replaced later: extra\.weight, extra\.bias\."),
        (ReplacesTheHead, r"2 parameters were made or replaced later: model\.head\.weight, model\.head\.bias\."),
        (AddsAScalar, r"1 parameters were made or replaced later: scale\. .* Make them in __init__ or configure_model"),
    ],
)
def test_parameters_of_before_or_after_sharding_are_refused(kind, message, n):
    error, text = refused(train, kind, {}, n)
    assert error == "RuntimeError"
    assert re.search(message, text), text
