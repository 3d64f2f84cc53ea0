"""An exception in a step that takes turns: surfaces as the user's own, ends the others, leaves nothing behind."""

import os
import signal
import traceback

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_chunkmbs.step_state import ThreadState
from tests.ranks import run_on_ranks
from tests.state_models import (
    LAYERS,
    WINDOW,
    Stepped,
    assert_same,
    in_backward,
    living_greenlets,
    lockstep,
    oracle,
    step_number,
    train,
)
from tests.strategy_models import all_sharded, apart, build, live_bytes, parameters
from tests.test_step_state import Functions, Operators, default_dtype

PLACES = ["before", "between", "after", "tail backward", "block", "recomputation", "argument"]
BEGUN = {"before": 3}  # steps that have begun when the third of four raises


class Failing(Stepped):
    """Fails once, at ``place``, in the third micro-batch of a window; ``ended`` has the steps whose ``finally`` ran."""

    step = 2
    error = ArithmeticError

    def __init__(self, place=None, epoch=0):
        super().__init__()
        self.place, self.epoch = place, epoch
        self.ended = []
        self.net.layers[1].watch = self.in_block

    def fail_at(self, place):
        if place == self.place and step_number.get() == self.step and self.current_epoch == self.epoch:
            self.place = None
            raise self.error(place)

    def in_block(self):
        if torch.is_grad_enabled():
            self.fail_at("recomputation" if in_backward() else "block")

    def of_gradient(self, gradient):
        if self.place == "tail backward":
            self.place = None
            raise self.error("tail backward")

    def training_step(self, batch, batch_idx):
        step_number.set(batch_idx)
        try:
            with torch.device("cpu"), Functions(), Operators(), self.trainer.profiler.profile("step"):
                return self.work(*batch, batch_idx)
        finally:
            self.ended.append(batch_idx)

    def work(self, x, y, batch_idx):
        self.fail_at("before")
        hidden = self.net.layers[0](self.net.embed(x))
        self.fail_at("between")
        if self.place == "argument" and batch_idx == self.step:
            self.net.layers[1](hidden, torch.zeros(5, 1))
        hidden = self.net.layers[2](self.net.layers[1](hidden))
        self.fail_at("after")
        out = self.net.head(self.net.norm(hidden))
        if batch_idx == self.step:
            out.register_hook(self.of_gradient)
        return (out - y).square().mean()


def strategy_for(place):
    """With ``y`` declared, where it is given and of a wrong size."""
    return lockstep(**({"chunk_arg_indexs": [0, 1]} if place == "argument" else {}))


def fail(module, error, strategy, **options):
    """Train until ``error``; returns its message and the names of the functions in its traceback."""
    with pytest.raises(error) as caught:
        train(module, strategy, **options)
    return str(caught.value), [frame.name for frame in traceback.extract_tb(caught.tb)]


def assert_clean(module, before):
    assert ThreadState.now() == before
    assert living_greenlets() == []
    assert all_sharded(module)
    assert live_bytes(module.trainer) == 0


def start_again(module):
    module.place, module.seen, module.reports, module.ended = None, [], [], []
    module.zero_grad()


def failing(place):
    before, profiler = ThreadState.now(), SimpleProfiler()
    module, unharmed = build(Failing, place), build(Failing)
    error = ValueError if place == "argument" else ArithmeticError
    message, functions = fail(module, error, strategy_for(place), profiler=profiler)
    ended, running = module.ended, [a for a in profiler.current_actions if a.startswith("step")]
    assert_clean(module, before)
    assert module.seen == []
    start_again(module)
    train(module, strategy_for(place))
    train(unharmed, strategy_for(place))
    assert module.reports[1].blocks == LAYERS
    assert_same(module, unharmed, close=1e-7)
    assert_clean(module, before)
    return message, functions, ended, running


@pytest.mark.parametrize("place", PLACES)
def test_a_window_after_an_exception_is_a_clean_one(place):
    [(message, functions, ended, running)] = run_on_ranks(1, failing, place)
    assert message == place or "layers.1: a declared tensor has the batch's size B" in message
    assert {"tail backward": "of_gradient", "recomputation": "in_block"}.get(place, "training_step") in functions
    assert sorted(ended) == list(range(BEGUN.get(place, WINDOW)))
    assert running == []


def failing_on_two_ranks(place):
    before = ThreadState.now()
    module, unharmed = build(Failing, place), build(Failing)
    fail(module, ArithmeticError, lockstep())
    assert_clean(module, before)
    start_again(module)
    train(module, lockstep())
    train(unharmed, lockstep())
    assert_same(module, unharmed, close=1e-7)
    return [(r.all_gathers, r.reduce_scatters) for r in module.reports[1:]]


@pytest.mark.parametrize("place", ["between", "recomputation"])
def test_a_window_after_an_exception_on_two_ranks(place):
    assert run_on_ranks(2, failing_on_two_ranks, place) == [[(2 * LAYERS + 1, LAYERS + 1)]] * 2


def reports_after(place):
    module = build(Failing, place)
    fail(module, ArithmeticError, lockstep())
    start_again(module)
    train(module, lockstep())
    return module.reports


@pytest.mark.parametrize("place", ["between", "recomputation"])
def test_a_report_holds_nothing_of_an_earlier_fit(place):
    [reports] = run_on_ranks(1, reports_after, place)
    assert [r.blocks for r in reports] == [LAYERS] * 2


class Retrying(Failing):
    """Catches what a window raises and takes its optimizer step again, as one does after running out of memory."""

    caught = 0

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        try:
            optimizer.step(closure=optimizer_closure)
        except ArithmeticError:
            self.caught += 1
            optimizer.zero_grad()
            optimizer.step(closure=optimizer_closure)


def retrying(place):
    before = ThreadState.now()
    module, unharmed = build(Retrying, place), build(Retrying)
    train(module, lockstep())
    train(unharmed, lockstep())
    assert (module.caught, unharmed.caught) == (1, 0)
    assert [r.chunks for r in module.reports[1:]] == [r.chunks for r in unharmed.reports[1:]]
    assert_same(module, unharmed, close=1e-7)
    assert_clean(module, before)


@pytest.mark.parametrize("place", ["after", "tail backward", "recomputation"])
def test_a_window_can_be_run_again_by_its_optimizer_step(place):
    run_on_ranks(1, retrying, place)


def resumed(folder, place):
    def run(module, name, **options):
        saving = ModelCheckpoint(folder / name, save_last=True, every_n_epochs=1, save_on_train_epoch_end=True)
        options |= {"max_epochs": 3, "enable_checkpointing": True, "callbacks": [saving]}
        train(module, lockstep(), **options)

    whole, module, later = build(Failing), build(Failing, place, 1), build(Failing)
    run(whole, "whole")
    with pytest.raises(ArithmeticError):
        run(module, "failed")
    assert len(module.seen) == 2
    run(later, "resumed", ckpt_path=folder / "failed" / "last.ckpt")
    assert len(later.seen) == 4
    assert max(map(apart, later.seen, whole.seen[2:])) == 0.0
    assert apart(parameters(later), parameters(whole)) == 0.0


@pytest.mark.parametrize("place", ["between", "recomputation"])
def test_a_fit_resumed_after_an_exception_equals_an_uninterrupted_one(place, tmp_path):
    run_on_ranks(1, resumed, tmp_path, place)


# -- how steps end -----------------------------------------------------------------------------------------------------


class Interrupted(Failing):
    """The interrupt comes while contexts are open and the default dtype is another."""

    error = KeyboardInterrupt

    def work(self, x, y, batch_idx):
        with default_dtype(torch.float64), torch.autocast("cpu", torch.bfloat16):
            return super().work(x, y, batch_idx)


def interrupted():
    before = ThreadState.now()
    module = build(Interrupted, "between")
    # Lightning turns an interrupt into the end of the process.
    fail(module, (SystemExit, KeyboardInterrupt), lockstep())
    assert_clean(module, before)
    return module.ended


def test_an_interrupt_ends_all_steps():
    [ended] = run_on_ranks(1, interrupted)
    assert sorted(ended) == list(range(WINDOW))


class Stubborn(Failing):
    """The other steps do not end as they are told to: one raises while it ends, one goes on, one returns."""

    def training_step(self, batch, batch_idx):
        try:
            return super().training_step(batch, batch_idx)
        except BaseException:
            if batch_idx == 0:
                raise ValueError("while ending") from None
            if batch_idx == 1:
                return super().training_step(batch, batch_idx)
            if batch_idx == 3:
                return None
            raise


def stubborn():
    before = ThreadState.now()
    module = build(Stubborn, "between")
    with pytest.raises(ArithmeticError, match="between"):
        train(module, lockstep())
    assert_clean(module, before)
    return module.ended


def test_steps_that_resist_are_ended_and_the_first_exception_surfaces():
    [ended] = run_on_ranks(1, stubborn)
    assert set(ended) == set(range(WINDOW))


class Catching(Failing):
    """Catches in the step itself and gives another loss."""

    def work(self, x, y, batch_idx):
        try:
            return super().work(x, y, batch_idx)
        except ArithmeticError:
            return self.net.head.weight.square().sum()


def catching():
    before = ThreadState.now()
    module, plain = build(Catching, "between"), build(Catching, "between")
    train(module, lockstep())
    train(plain, oracle())
    assert_same(module, plain)
    assert_clean(module, before)


def test_a_step_may_catch_its_own_exception():
    run_on_ranks(1, catching)


# -- what comes from outside, and after the window ---------------------------------------------------------------------


class Terminated(Failing):
    """The ranks are told to end (by a scheduler, say) in the middle of their second micro-batch."""

    def fail_at(self, place):
        if place == self.place and step_number.get() == 1:
            self.place = None
            os.kill(os.getpid(), signal.SIGTERM)


def terminated():
    before = ThreadState.now()
    module, unharmed = build(Terminated, "between"), build(Failing)
    with pytest.raises(SIGTERMException):
        train(module, lockstep())
    assert_clean(module, before)
    windows = len(module.seen)
    train(unharmed, lockstep(), max_steps=1)
    assert apart(parameters(module), parameters(unharmed)) <= 1e-7
    return windows


def test_ranks_that_are_terminated_end_after_the_window():
    assert run_on_ranks(2, terminated) == [1, 1]


class FailingOptimizer(Failing):
    """The optimizer fails once, after the window has run in its closure."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        step, module = optimizer.step, self

        def failing(closure=None):
            if module.place != "optimizer":
                return step(closure)
            module.place = None
            closure()
            raise ArithmeticError("optimizer")

        optimizer.step = failing
        return optimizer


def failing_optimizer():
    before = ThreadState.now()
    module, unharmed = build(FailingOptimizer, "optimizer"), build(FailingOptimizer)
    with pytest.raises(ArithmeticError, match="optimizer"):
        train(module, lockstep())
    assert_clean(module, before)
    start_again(module)
    train(module, lockstep())
    train(unharmed, lockstep())
    assert_same(module, unharmed, close=1e-7)
    return [(r.all_gathers, r.reduce_scatters) for r in module.reports[1:]]


def test_a_window_after_an_exception_of_the_optimizer():
    assert run_on_ranks(2, failing_optimizer) == [[(2 * LAYERS + 1, LAYERS + 1)]] * 2
