"""Mistakes in a script: each one clear error, the same on every rank, before the model is gathered for a step.

Others are beside what they are about: plans and their fields in ``test_plans.py``, what they match and cover in
``test_patterns.py`` and ``test_plans_applied.py``, arguments of the strategy in ``test_strategy.py``, loaders in
``test_uneven_data.py``.
"""

from __future__ import annotations

import re

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.accelerators import CPUAccelerator
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_chunkmbs import ChunkMBSStrategy
from tests.ranks import count_collectives, raises_on_ranks, run_on_ranks
from tests.strategy_models import (
    LAYERS,
    Toy,
    build,
    chunked,
    fit,
    loader,
    trainer_of,
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


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        ({"apply_modules": ["model.layer.{*}"]}, "ValueError", r"matches none"),
        ({"apply_modules": [LAYERS, LAYERS]}, "ValueError", r"must name everything once.*given twice"),
        ({"chunk_mbs": 0}, "ValueError", r"chunk_mbs .* must be at least 1, but got 0"),
        ({"chunk_mbs": -1}, "ValueError", r"must be at least 1, but got -1"),
        ({"chunk_mbs": 2.0}, "TypeError", r"must be an integer, but got 2\.0 \(float\)"),
        ({"chunk_mbs": True}, "TypeError", r"must be an integer, but got True \(bool\)"),
        ({"chunk_mbs": "2"}, "TypeError", r"must be an integer, but got '2' \(str\)"),
        ({"batch_dim": -1}, "ValueError", r"batch_dim must be at least 0"),
        ({"chunk_arg_indexs": [0, 0]}, "ValueError", r"everything once, but 0 is given twice"),
        ({"chunk_kwarg_names": ["scale", "scale"]}, "ValueError", r"once, but 'scale' is given twice"),
    ],
)
def test_plans_are_refused_on_every_rank(plan, error, message):
    found, text = refused(train, Toy, plan, 1)
    assert found == error
    assert re.search(message, text), text


def train_out_of_range(n):
    with count_collectives() as counted:
        try:
            plan = {"apply_modules": [LAYERS], "batch_dim": 5}
            fit(build(), chunked(chunkmbs_plan=plan), accumulate_grad_batches=n)
        finally:
            assert counted.reduce_scatters == 0


@pytest.mark.parametrize("n", [1, 3])
def test_a_batch_dimension_that_no_argument_has_is_refused_at_the_first_call(n):
    error, text = refused(train_out_of_range, n)
    assert error == "ValueError"
    assert re.search(r"model\.layers\.0: .*has shape \(4, 3, 8\) and no dimension 5", text), text


class Nothing(IterableDataset):
    def __iter__(self):
        return iter(())


def train_on_nothing(n):
    with count_collectives() as counted:
        try:
            trainer_of(chunked(), accumulate_grad_batches=n).fit(build(), DataLoader(Nothing()))
        finally:
            assert counted.all_gathers == counted.reduce_scatters == 0


@pytest.mark.parametrize("n", [1, 4])
def test_a_stream_without_samples_is_refused(n):
    error, text = refused(train_on_nothing, n)
    assert error == "ValueError"
    assert re.search(r"yields none on the ranks \[0, 1\]\. Look at what its dataset iterates over", text), text


def use_twice(fitted, accelerator):
    strategy = chunked()
    trainer = trainer_of(strategy)
    if fitted:
        trainer.fit(build(), loader())
    with count_collectives() as counted:
        try:
            trainer_of(strategy, accelerator=accelerator)
        finally:
            assert counted.all_gathers == counted.reduce_scatters == 0


@pytest.mark.parametrize("accelerator", ["cpu", "auto", CPUAccelerator()])
@pytest.mark.parametrize("fitted", [False, True])
def test_a_strategy_that_belongs_to_a_trainer_is_refused_by_another(fitted, accelerator):
    error, text = refused(use_twice, fitted, accelerator)
    assert error == "RuntimeError"
    assert re.search(r"was given to another one\. Make one for each: Trainer\(strategy=ChunkMBSStrategy", text), text


def use_again():
    """One Trainer: the same module twice, evaluated, and another module."""
    trainer = trainer_of(chunked(), max_epochs=1)
    module = build()
    trainer.fit(module, loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())
    trainer.test(module, loader(), verbose=False)
    other = build()
    trainer.fit_loop.max_epochs = 3
    trainer.fit(other, loader())
    return len(module.seen), len(module.scores), len(other.seen)


def test_its_own_trainer_runs_again():
    steps = len(run_on_ranks(2, batches)[0])
    assert run_on_ranks(2, use_again) == [(2 * steps, steps, steps)] * 2


def batches():
    return list(loader())


def make_fabric(by_name):
    plan = {"apply_modules": [LAYERS]}
    Fabric(accelerator="cpu", devices=2, strategy="chunkmbs" if by_name else ChunkMBSStrategy(chunkmbs_plan=plan))


@pytest.mark.parametrize("by_name", [True, False])
def test_fabric_is_refused(by_name):
    error, text = refused(make_fabric, by_name)
    assert error == "TypeError"
    assert re.search(r"was given to Fabric.*Write lightning\.pytorch\.Trainer\(strategy=ChunkMBSStrategy", text), text
