"""Runs and calls that end by an exception, and what comes after them."""

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.strategy_models import (
    Toy,
    all_sharded,
    apart,
    build,
    chunked,
    fit,
    live_bytes,
    loader,
    parameters,
    train_plainly,
    trainer_of,
)

CLOSE = 2e-6


class Failing(Toy):
    """Raises where it is told to."""

    def __init__(self):
        super().__init__()
        self.where = None

    def fail_at(self, place):
        if place == self.where:
            raise ArithmeticError(place)

    def loss(self, batch):
        def hook_gradient(_module, _args, hidden):
            if hidden.requires_grad:
                hidden.register_hook(lambda _gradient: self.fail_at("backward"))

        first, second = self.model.layers[0], self.model.layers[1].down
        handles = first.register_forward_hook(hook_gradient), second.register_forward_pre_hook(self.fail_in_block)
        try:
            return super().loss(batch)
        finally:
            for handle in handles:
                handle.remove()

    def fail_in_block(self, _module, _args):
        self.fail_at("block")

    def training_step(self, batch, batch_idx):
        self.fail_at("training_step")
        loss = self.loss(batch)
        self.fail_at("end of training_step")
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.fail_at("validation_step")
        self.scores.append(loss.item())

    def on_train_epoch_end(self):
        if self.where == "outside call":
            self.where = "block"
            self.loss(next(iter(loader())))


def failing_run(where):
    module = build(Failing)
    module.where = where
    trainer = trainer_of(chunked(), limit_val_batches=3)
    with pytest.raises(ArithmeticError, match=where if where != "outside call" else "block"):
        trainer.fit(module, loader(), loader())
    assert all_sharded(module)
    assert live_bytes(trainer) == 0

    module.where, module.seen, module.reports = None, [], []
    plain = build(Failing)
    plain.load_state_dict(parameters(module))
    for p in module.parameters():
        p.grad = None
    again = trainer_of(chunked(), limit_val_batches=3)
    again.fit(module, loader(), loader())
    train_plainly(plain)
    assert len(module.seen) == 3
    assert max(map(apart, module.seen, plain.seen)) < 1e-6
    assert [(r.all_gathers, r.reduce_scatters, r.chunks) for r in module.reports[1:]] == [(7, 4, 12)] * 2
    assert live_bytes(again) == 0


class Recovering(Failing):
    """Catches what its own step raises and takes the step again."""

    automatic_optimization = False

    def __init__(self, first):
        super().__init__()
        self.first = first
        self.caught = 0

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for where in (self.first, None):
            self.where = where
            optimizer.zero_grad()
            try:
                self.manual_backward(self.loss(batch))
            except ArithmeticError:
                self.caught += 1
        optimizer.step()


def recovering_run(first):
    module, plain = build(Recovering, first), train_plainly(build(Failing), epochs=2)
    trainer = fit(module, max_epochs=2)
    assert module.caught == 6
    assert apart(parameters(module), parameters(plain)) < CLOSE
    assert live_bytes(trainer) == 0


class FailingOutside(Failing):
    """Catches what a call outside the steps raises."""

    def on_train_epoch_end(self):
        for enabled in (False, True):
            self.where = "block"
            with torch.set_grad_enabled(enabled), pytest.raises(ArithmeticError):
                self.loss(next(iter(loader())))
            self.where = None
            assert all_sharded(self), f"gathered after an exception, gradients enabled: {enabled}"


def failing_outside():
    module, plain = build(FailingOutside), train_plainly(build(Failing), epochs=2)
    trainer = fit(module, max_epochs=2)
    assert apart(parameters(module), parameters(plain)) < CLOSE
    assert live_bytes(trainer) == 0


@pytest.mark.parametrize(
    "where", ["training_step", "block", "end of training_step", "backward", "validation_step", "outside call"]
)
def test_a_run_after_an_exception_is_a_clean_run(where):
    run_on_ranks(2, failing_run, where)


@pytest.mark.parametrize("where", ["block", "backward"])
def test_a_step_can_catch_an_exception_and_try_again(where):
    run_on_ranks(2, recovering_run, where)


def test_an_exception_of_a_call_outside_steps_can_be_caught():
    run_on_ranks(2, failing_outside)
