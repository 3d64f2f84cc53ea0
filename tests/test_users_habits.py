"""What users do inside steps and around blocks, side by side with Lightning on one device: the same training."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

from tests.ranks import raises_on_ranks, run_on_ranks
from tests.state_models import (
    LAYERS,
    Layer,
    Stepped,
    assert_same,
    build,
    compare,
    lockstep,
    one_by_one,
    oracle,
    train,
)


class Recorded(Stepped):
    """A hook writes a block's output into a dict, which the loss uses."""

    def __init__(self):
        super().__init__()
        self.features = {}
        self.net.layers[0].register_forward_hook(lambda _m, _a, out: self.features.__setitem__("first", out))
        self.net.embed.register_forward_hook(lambda _m, _a, out: self.features.__setitem__("embedded", out))

    def loss(self, x, y, batch_idx):
        loss = super().loss(x, y, batch_idx)
        return loss + 0.1 * (self.features["first"].square().mean() + self.features["embedded"].square().mean())


class Cleared(Stepped):
    """A list is cleared and filled in every step."""

    def __init__(self):
        super().__init__()
        self.hidden = []

    def loss(self, x, y, batch_idx):
        self.hidden.clear()
        loss = (self.net(x, between=lambda _i, h: self.hidden.append(h)) - y).square().mean()
        assert len(self.hidden) == LAYERS
        return loss + 0.1 * sum(self.hidden).square().mean()


class TargetInBuffer(Stepped):
    """The target waits in a buffer until the blocks have run."""

    def __init__(self):
        super().__init__()
        self.register_buffer("target", torch.zeros(1))

    def loss(self, x, y, batch_idx):
        self.target = y
        return (self.net(x) - self.target).square().mean()


class HookedOutput(Stepped):
    """A tensor hook scales the gradient between blocks."""

    def loss(self, x, y, batch_idx):
        def between(_i, hidden):
            hidden.register_hook(lambda grad: grad * 0.5)

        return (self.net(x, between=between) - y).square().mean()


class EvalInSome(Stepped):
    """Every second step makes a pass in evaluation mode, without gradients, before its own."""

    def __init__(self):
        super().__init__()
        for layer in self.net.layers:
            layer.register_forward_hook(lambda m, _a, out: out if m.training else 0.5 * out)

    def loss(self, x, y, batch_idx):
        aim = y
        if batch_idx % 2:
            self.net.eval()
            with torch.no_grad():
                aim = self.net(x)
            self.net.train()
        return (self.net(x) - aim).square().mean()


class NormalizedHead(Stepped):
    """Weights outside the blocks are written in place in the step, as prototypes are."""

    def loss(self, x, y, batch_idx):
        with torch.no_grad():
            self.net.head.weight.copy_(normalize(self.net.head.weight.clone(), dim=1))
        return super().loss(x, y, batch_idx)


class CheckpointedHead(Stepped):
    """The user checkpoints a direct child."""

    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(2, 2)

    def loss(self, x, y, batch_idx):
        return (checkpoint(self.out, self.net(x), use_reentrant=False) - y).square().mean()


class Perturbed(Stepped):
    """An adversarial step: the gradient with respect to the input, then a second pass."""

    def loss(self, x, y, batch_idx):
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad((self.net(x) - y).square().mean(), x)
        return (self.net((x + 0.1 * grad.sign()).detach()) - y).square().mean()


ONE_PASS = [Recorded, Cleared, TargetInBuffer, HookedOutput, NormalizedHead, CheckpointedHead]


def in_lockstep(kind, calls):
    compare(kind, calls=calls)


@pytest.mark.parametrize("kind", ONE_PASS)
def test_a_window_trains_as_with_lightning(kind):
    run_on_ranks(1, in_lockstep, kind, LAYERS)


def with_teacher():
    ours, theirs = build(EvalInSome), build(EvalInSome)
    train(ours, lockstep())
    train(theirs, oracle())
    # Steps with a teacher's pass come later and catch up with the others at the last block.
    assert [r.blocks for r in ours.reports] == [2 * LAYERS - 1] * 2
    assert_same(ours, theirs)


def test_modes_of_modules_belong_to_a_step():
    run_on_ranks(1, with_teacher)


def one_at_a_time(kind):
    ours, theirs = build(kind), build(kind)
    train(ours, one_by_one())
    train(theirs, oracle())
    assert all(r.chunks > r.blocks for r in ours.reports)
    assert_same(ours, theirs)


@pytest.mark.parametrize("kind", [*ONE_PASS, Perturbed])
def test_steps_one_by_one_train_as_with_lightning(kind):
    run_on_ranks(1, one_at_a_time, kind)


class Penalized(Stepped):
    """A gradient penalty needs gradients of gradients."""

    def loss(self, x, y, batch_idx):
        x = x.clone().requires_grad_()
        out = self.net(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return (out - y).square().mean() + grad.square().mean()


def trained(kind):
    train(build(kind), one_by_one())


def test_gradients_of_gradients_through_blocks_are_refused():
    [(kind, message)] = raises_on_ranks(1, trained, Penalized)
    assert kind == "RuntimeError"
    assert "create_graph=True" in message


class Writing(Layer):
    def forward(self, x, y=None):
        y["out"] = super().forward(x)


class WritesIntoArgument(Stepped):
    def __init__(self):
        super().__init__()
        self.net.layers = torch.nn.ModuleList(Writing() for _ in range(LAYERS))

    def loss(self, x, y, batch_idx):
        hidden = self.net.embed(x)
        for layer in self.net.layers:
            results = {"in": hidden}
            layer(hidden, results)
            hidden = results["out"]
        return (self.net.head(hidden) - y).square().mean()


def test_a_block_that_returns_nothing_is_refused():
    [(kind, message)] = raises_on_ranks(1, trained, WritesIntoArgument)
    assert kind == "TypeError"
    assert "returned no tensor" in message


class Counting(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x, y=None):
        self.calls += 1
        self.replaced = self.replaced + 1
        return super().forward(x)


class CountsInBlocks(Stepped):
    def __init__(self):
        super().__init__()
        self.net.layers = torch.nn.ModuleList(Counting() for _ in range(LAYERS))


def counted():
    module = build(CountsInBlocks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(module, lockstep())
    chunks = sum(r.chunks for r in module.reports) // LAYERS
    told = [str(w.message) for w in caught if "writes its buffers" in str(w.message)]
    return [(float(layer.calls), float(layer.replaced)) for layer in module.net.layers], chunks, told


def test_recomputation_leaves_the_buffers_of_a_block_alone():
    [(counts, chunks, told)] = run_on_ranks(1, counted)
    assert counts == [(chunks, chunks)] * LAYERS
    assert len(told) == 1
    assert "calls, replaced" in told[0]


class KeepsLogits(Stepped):
    """Logits are kept on the module and returned."""

    alive: list[int]

    def loss(self, x, y, batch_idx):
        self.last = self.net(x)
        return {"loss": (self.last - y).square().mean(), "logits": self.last}


def outputs_of_a_window():
    module = build(KeepsLogits)
    trainer = train(module, lockstep())
    outputs = trainer.strategy.window_outputs
    return [(o["logits"].requires_grad, tuple(o["logits"].shape)) for o in outputs]


def test_outputs_of_a_window_hold_no_graph():
    [outputs] = run_on_ranks(1, outputs_of_a_window)
    assert [needs_grad for needs_grad, _ in outputs] == [False] * 4
    assert [shape[0] for _, shape in outputs] == [3, 2, 2, 1]
