"""Weights that change between the calls of a step: what was gathered ahead of the change is not used after it."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from lightning_chunkmbs.fsdp2 import fsdp_state
from tests.ranks import run_on_ranks
from tests.strategy_models import (
    Block,
    Toy,
    apart,
    build,
    chunked,
    fit,
    loader,
    parameters,
    train_plainly,
    whole_batches,
)

CLOSE = 2e-6


class Manual(Toy):
    """``work`` is what a training step does; the oracle runs it without a Trainer."""

    automatic_optimization = False
    wrapped = True  # whether steps are the Trainer's
    steps = 0

    def training_step(self, batch, batch_idx):
        self.work(*batch, self.optimizers(use_pl_optimizer=self.wrapped), self.manual_backward)

    def train(self, x, y, optimizer, backward):
        optimizer.zero_grad()
        backward(mse_loss(self.model(x), y))
        optimizer.step()

    @torch.no_grad()
    def run(self, hidden, *blocks):
        for i in blocks:
            hidden = self.model.layers[i](hidden)
        return hidden

    def on_before_optimizer_step(self, optimizer):
        pass


class StepBetweenBlocks(Manual):
    """An optimizer steps when the next block is gathered already."""

    def work(self, x, y, optimizer, backward):
        loss = mse_loss(self.model(x), y)
        optimizer.zero_grad()
        backward(loss)
        hidden = self.run(torch.cat([x, x], -1), 0)
        optimizer.step()
        hidden = self.run(hidden, 1, 2)
        self.train(x, y + hidden[..., :2], optimizer, backward)


class StepBeforeBackward(Manual):
    """Each step of the optimizer is with the gradients of the training step before."""

    def work(self, x, y, optimizer, backward):
        self.steps += 1
        if self.steps > 1:
            hidden = self.run(torch.cat([x, x], -1), 0)
            optimizer.step()
            y = y + self.run(hidden, 1, 2)[..., :2]
            optimizer.zero_grad()
        backward(mse_loss(self.model(x), y))


class StepBetweenBlocksPastTheTrainer(StepBetweenBlocks):
    wrapped = False


class StepBeforeBackwardPastTheTrainer(StepBeforeBackward):
    wrapped = False


class WrittenBetweenBlocks(Manual):
    """The weights of the next block are written to when it is gathered already."""

    def write(self, parameter):
        parameter.mul_(0.9)

    def work(self, x, y, optimizer, backward):
        hidden = self.run(torch.cat([x, x], -1), 0)
        with torch.no_grad():
            for parameter in self.model.layers[1].parameters():
                self.write(parameter)
        hidden = self.run(hidden, 1, 2)
        self.train(x, y + hidden[..., :2], optimizer, backward)


class ShardsWrittenBetweenBlocks(WrittenBetweenBlocks):
    def write(self, parameter):
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        local.mul_(0.9)


def manual(kind):
    module, plain = build(kind), build(kind)
    trainer = fit(module, max_epochs=2)
    optimizer = plain.configure_optimizers()
    for _ in range(2):
        for batch in whole_batches():
            plain.work(*batch, optimizer, torch.Tensor.backward)
    assert apart(parameters(plain), parameters(build(kind))) > 1e-3, "the oracle did not train"
    assert apart(parameters(module), parameters(plain)) < CLOSE
    return trainer.strategy.step_report.chunks if kind.wrapped else None


@pytest.mark.parametrize(
    "kind",
    [
        StepBetweenBlocks,
        StepBeforeBackward,
        StepBetweenBlocksPastTheTrainer,
        StepBeforeBackwardPastTheTrainer,
        WrittenBetweenBlocks,
        ShardsWrittenBetweenBlocks,
    ],
)
def test_blocks_called_after_a_change_have_the_new_weights(kind):
    for chunks in run_on_ranks(2, manual, kind):
        assert chunks is None or chunks >= 12


class Momentum(Toy):
    """A teacher's blocks come after the student's, and follow them in between (momentum contrast)."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.ModuleList(deepcopy(layer) for layer in self.model.layers)
        self.teacher.requires_grad_(False)

    def loss(self, batch):
        x, y = batch
        prediction = self.model(x)
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.model.layers.parameters(), strict=True):
                old.mul_(0.5).add_(new, alpha=0.5)
            hidden = torch.cat([x, x], -1)
            for layer in self.teacher:
                hidden = layer(hidden)
        return mse_loss(prediction, y + hidden[..., :2])


def momentum():
    plan = {"apply_modules": ["model.layers.{*}", "teacher.{*}"], "chunk_mbs": 1}
    module = build(Momentum)
    trainer = fit(module, chunked(chunkmbs_plan=plan), max_epochs=2)
    plain = train_plainly(build(Momentum), epochs=2)
    assert apart(parameters(module), parameters(plain)) < CLOSE
    # One gather for each of a teacher's blocks, and another of the first, which was written to.
    return trainer.strategy.step_report.all_gathers


def test_a_teacher_that_follows_between_two_passes():
    assert run_on_ranks(2, momentum) == [7 + 3 + 1] * 2


class Bare(Toy):
    """Nothing but blocks, the last of them not in each step."""

    def __init__(self):
        super().__init__()
        self.model = nn.ModuleList(Block() for _ in range(3))
        self.steps = 0

    def loss(self, batch):
        x, y = batch
        self.steps += 1
        hidden = torch.cat([x, x], -1)
        for block in self.model[: 2 + self.steps % 2]:
            hidden = block(hidden)
        return mse_loss(hidden[..., :2], y)

    def on_train_batch_start(self, batch, batch_idx):
        assert not fsdp_state(self)._comm_ctx.post_forward_order, "a backward pass was not brought to its end"


def bare():
    plan = {"apply_modules": ["model.{*}"], "chunk_mbs": 1}
    module = build(Bare)
    trainer = fit(module, chunked(chunkmbs_plan=plan), data=loader(32), max_epochs=2)
    plain = train_plainly(build(Bare), whole_batches(32), epochs=2)
    assert apart(parameters(module), parameters(plain)) < CLOSE
    return trainer.strategy.step_report.chunks


def test_a_model_of_blocks_only_ends_its_backward_passes():
    assert run_on_ranks(2, bare) == [4 * 2] * 2
