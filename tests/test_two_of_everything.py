"""Two trainers in a process, two models in a module, two optimizers in a step."""

import pytest
import torch
from torch import nn

from tests.ranks import run_on_ranks
from tests.state_models import LAYERS, Stepped, assert_same, compare, lockstep, oracle, train
from tests.state_models import Net as SteppedNet
from tests.strategy_models import (
    LAYERS as PATTERN,
)
from tests.strategy_models import (
    PARTS,
    Sharding,
    Toy,
    apart,
    build,
    chunked,
    full,
    live_bytes,
    loader,
    parameters,
    stock,
    trainer_of,
)
from tests.test_manual_optimization import ADVERSARIES, Adversaries, Untoggled, work_plainly

CLOSE = 2e-6
WINDOW = 2
SAMPLES = 48

# -- one trainer after another -----------------------------------------------------------------------------------------


def fitted(kind, strategy):
    module = build(kind)
    trainer = trainer_of(strategy, accumulate_grad_batches=WINDOW, max_epochs=2)
    trainer.fit(module, loader(SAMPLES))
    assert trainer.global_step == 6
    return module, trainer


def other_strategies_in_between():
    first, trainer = fitted(Toy, chunked())
    theirs, _ = fitted(Sharding, stock())
    bigger, _ = fitted(Toy, chunked(chunkmbs_plan={"apply_modules": [PATTERN], "chunk_mbs": 2}))
    uncut, _ = fitted(Toy, chunked(enable_chunk_mbs=False, enable_activation_offload=False))
    again, _ = fitted(Toy, chunked())
    assert [r.chunks for r in first.reports[1::2]] == [3 * PARTS * WINDOW] * 6
    assert [r.chunks for r in bigger.reports[1::2]] == [3 * PARTS // 2 * WINDOW] * 6
    assert [r.blocks for r in uncut.reports[1::2]] == [3 * WINDOW] * 6
    assert again.reports == first.reports
    assert len(first.seen) == len(again.seen) == 6
    assert max(map(apart, again.seen, first.seen)) == apart(parameters(again), parameters(first)) == 0
    for other in (theirs, bigger, uncut):
        assert max(map(apart, other.seen, first.seen)) < CLOSE
        assert apart(parameters(other), parameters(first)) < 10 * CLOSE
    assert live_bytes(trainer) == 0


def test_a_run_is_the_same_after_runs_with_other_strategies():
    run_on_ranks(2, other_strategies_in_between)


def all_stages():
    module, plain = build(), build()
    trainer = trainer_of(chunked(), accumulate_grad_batches=WINDOW, limit_val_batches=1)
    trainer.fit(module, loader(SAMPLES), loader(SAMPLES))
    module.scores = []
    trainer.validate(module, loader(SAMPLES), verbose=False)
    trainer.test(module, loader(SAMPLES), verbose=False)
    predicted = trainer.predict(module, loader(SAMPLES))
    plain.load_state_dict(parameters(module))
    expected = [plain.loss(batch).item() for batch in loader(SAMPLES)]
    assert module.scores == pytest.approx([expected[0], *expected], abs=CLOSE)
    for found, (x, _) in zip(predicted, loader(SAMPLES), strict=True):
        torch.testing.assert_close(found, plain.model(x), rtol=0, atol=CLOSE)
    assert [r.blocks for r in module.reports[1::2]] == [3] * 3
    assert live_bytes(trainer) == 0


def test_fit_validate_test_and_predict_with_windows():
    run_on_ranks(2, all_stages)


# -- a frozen teacher --------------------------------------------------------------------------------------------------


class Distilled(Stepped):
    """The teacher has blocks of the same kind; the loss compares its output and a hidden state."""

    def __init__(self):
        super().__init__()
        self.teacher = SteppedNet().requires_grad_(False)

    def hidden(self, net, x):
        states = []
        return net(x, between=lambda _i, h: states.append(h)), states[1]

    def loss(self, x, y, batch_idx):
        with torch.no_grad():
            aim, known = self.hidden(self.teacher.eval(), x)
        out, learned = self.hidden(self.net, x)
        return (out - y).square().mean() + (out - aim).square().mean() + (learned - known).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2, eps=1e-4)


class InsideGraph(Distilled):
    """The teacher is called with gradients on, after the student, and on what the student made."""

    def loss(self, x, y, batch_idx):
        out = self.net(x)
        aim = self.teacher(torch.cat([out, out], -1))
        return (out - y).square().mean() + aim.square().mean()


def distilled(kind, calls, gathers):
    ours, theirs = compare(kind, calls=calls)
    assert apart(parameters(ours.teacher), parameters(build(kind).teacher)) == 0
    assert [r.all_gathers for r in ours.reports] == [gathers] * 2
    assert all(p.grad is None for p in ours.teacher.parameters())
    assert len(ours.seen) == len(theirs.seen) == 2


# What is counted as chunked calls are those with gradients; the teacher's blocks are gathered once a window either way.
@pytest.mark.parametrize(("kind", "calls", "gathers"), [(Distilled, 1, 3), (InsideGraph, 2, 4)])
def test_a_frozen_teacher_inside_the_module(kind, calls, gathers):
    run_on_ranks(2, distilled, kind, calls * LAYERS, gathers * LAYERS + 1)


def teacher_outside_the_plan():
    ours, theirs = build(Distilled), build(Distilled)
    train(ours, lockstep(apply_modules=["net.layers.{*}"]))
    train(theirs, oracle())
    assert [r.blocks for r in ours.reports] == [LAYERS] * 2
    assert_same(ours, theirs)


def test_a_frozen_teacher_outside_the_plan():
    run_on_ranks(2, teacher_outside_the_plan)


# -- two optimizers ----------------------------------------------------------------------------------------------------


class Seen:
    """Keeps what each optimizer step sees as the gradients of all parameters of the module."""

    def configure_optimizers(self):
        optimizers = super().configure_optimizers()
        self.held = [p for o in optimizers for g in o.param_groups for p in g["params"]]
        for i, optimizer in enumerate(optimizers):
            optimizer.register_step_pre_hook(lambda *_args, i=i: self.see(i))
        return optimizers

    def see(self, i):
        grads = {str(n): full(p.grad).clone() for n, p in enumerate(self.held) if p.grad is not None}
        self.seen.append((i, grads))


class SeenAdversaries(Seen, Adversaries):
    pass


class SeenUntoggled(Seen, Untoggled):
    pass


def adversaries(kind):
    module, plain = build(kind), work_plainly(build(kind))
    trainer = trainer_of(chunked(chunkmbs_plan=ADVERSARIES), max_epochs=2)
    trainer.fit(module, loader())
    assert [i for i, _ in module.seen] == [i for i, _ in plain.seen] == [0, 1] * 6
    for (_, found), (_, expected) in zip(module.seen, plain.seen, strict=True):
        assert apart(found, expected) < CLOSE
    assert apart(parameters(module), parameters(plain)) < CLOSE
    assert trainer.strategy.step_report.chunks > trainer.strategy.step_report.blocks
    count = sum(isinstance(m, nn.Linear) for m in module.model.modules())
    return len(module.seen[0][1]), count


@pytest.mark.parametrize("kind", [SeenAdversaries, SeenUntoggled])
def test_gradients_of_two_optimizers_are_those_of_one_process(kind):
    for number, layers in run_on_ranks(2, adversaries, kind):
        assert number >= 2 * layers
