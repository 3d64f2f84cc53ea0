"""Norms of gradients and clipping: over all parameters, once per step, with every kind of optimizer."""

import math

import pytest
import torch
from torch import nn

from tests.ranks import raises_on_ranks, run_on_ranks
from tests.strategy_models import Toy, apart, build, chunked, fit, full, loader, parameters, train_plainly

CLIP = 0.05


class Scaled(Toy):
    """With a 0-dim parameter, which every rank holds whole; logs the norm of the gradients."""

    def __init__(self, optimizer=None, **options):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.make = optimizer or torch.optim.SGD
        self.options = options or {"lr": 0.1}
        self.norms, self.clipped, self.clips = [], [], 0

    def loss(self, batch):
        x, y = batch
        return (self.scale * self.model(x) - y).square().mean()

    def on_before_optimizer_step(self, optimizer):
        norm = self.trainer.strategy.gradient_norm()
        self.log("norm", norm)
        self.norms.append((self.trainer.callback_metrics["norm"].item(), norm.item()))
        super().on_before_optimizer_step(optimizer)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clips += 1
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.clipped.append([full(p.grad) for p in self.parameters()])

    def configure_optimizers(self):
        return self.make(self.parameters(), **self.options)


def fit_in(precision, module, **options):
    # The batches are fp32: layers in bf16 need them cast.
    fit(module, chunked(fsdp_plan={"cast_forward_inputs": precision == "bf16-true"}), precision=precision, **options)


def norm_of(tensors):
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors))


def norms(n, precision):
    module = build(Scaled)
    fit_in(precision, module, data=loader(batch=4 // n), accumulate_grad_batches=n)
    assert module.clips == 3
    assert module.reports[-1].chunks == 12
    for logged, norm in module.norms:
        assert logged == norm
    whole = [norm_of(seen.values()) for seen in module.seen]
    return [norm for _, norm in module.norms], whole


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("n", [1, 2])
def test_the_norm_that_is_logged_is_that_of_all_ranks_together(n, precision):
    (first, whole), (second, _) = run_on_ranks(2, norms, n, precision)
    assert first == second
    assert first == pytest.approx(whole, rel=1e-5)


def norms_by_hand():
    module, plain = build(Scaled), train_plainly(build(Scaled))
    fit(module)
    expected = [norm_of(seen.values()) for seen in plain.seen]
    assert [norm for _, norm in module.norms] == pytest.approx(expected, rel=1e-5)
    inf = module.trainer.strategy.gradient_norm(float("inf")).item()
    return inf, max(g.abs().max().item() for g in module.clipped[-1])


def test_the_norm_equals_that_of_one_process():
    for inf, expected in run_on_ranks(2, norms_by_hand):
        assert inf == pytest.approx(expected)


def clipped(optimizer, options, precision, algorithm):
    """The norm before and after clipping, the largest value after, and what the optimizer made of it."""
    torch.manual_seed(1)
    module = Scaled(optimizer, **options)
    fit_in(precision, module, gradient_clip_val=CLIP, gradient_clip_algorithm=algorithm)
    assert module.clips == 3
    before = [norm for _, norm in module.norms]
    after = [norm_of(step) for step in module.clipped]
    largest = [max(g.abs().max().item() for g in step) for step in module.clipped]
    return before, after, largest, parameters(module)


ADAMW = {"lr": 1e-2, "eps": 1e-4}
OPTIMIZERS = {
    "fused": (torch.optim.AdamW, {**ADAMW, "fused": True}),
    "foreach": (torch.optim.AdamW, {**ADAMW, "foreach": True}),
    "one by one": (torch.optim.AdamW, {**ADAMW, "foreach": False}),
}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_clipping_by_norm_with_every_kind_of_optimizer(precision):
    results = {}
    for name, (optimizer, options) in OPTIMIZERS.items():
        first, second = run_on_ranks(2, clipped, optimizer, options, precision, "norm")
        assert apart(first[3], second[3]) == 0
        before, after, _, results[name] = first
        assert min(before) > 2 * CLIP
        assert max(after) <= CLIP * (1.01 if precision == "bf16-true" else 1 + 1e-5)
    tolerance = 2e-2 if precision == "bf16-true" else 2e-6
    assert apart(results["fused"], results["one by one"]) < tolerance
    assert apart(results["foreach"], results["one by one"]) < tolerance


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_clipping_by_value(precision):
    value = CLIP / 5
    for largest in run_on_ranks(2, clipped_by_value, precision, value):
        assert any(before > value for before, _ in largest)
        assert all(after == pytest.approx(min(before, value), rel=1e-2) for before, after in largest)


def clipped_by_value(precision, value):
    module = build(Scaled)
    fit_in(precision, module, gradient_clip_val=value, gradient_clip_algorithm="value")
    before = [g.abs().max().item() for step in module.seen for g in step.values()]
    after = [g.abs().max().item() for step in module.clipped for g in step]
    return list(zip(before, after, strict=True))


# -- not finite --------------------------------------------------------------------------------------------------------


class Strict(Scaled):
    """One rank's loss is infinite in the second step; clipping is asked to notice."""

    def __init__(self, ours):
        super().__init__()
        self.ours = ours

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 1 and self.global_rank == 1 else loss

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.ours:
            plugin = self.trainer.precision_plugin
            plugin.clip_grad_by_norm(optimizer, CLIP, error_if_nonfinite=True)
        else:
            nn.utils.clip_grad_norm_(self.parameters(), CLIP, error_if_nonfinite=True)
        self.clipped.append([full(p.grad) for p in self.parameters()])


def strict(ours, precision):
    torch.manual_seed(1)
    module = Strict(ours)
    try:
        fit_in(precision, module)
    finally:
        assert len(module.clipped) == 1
        assert norm_of(module.clipped[0]) <= CLIP * 1.01


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_error_if_nonfinite_is_raised_on_every_rank(precision):
    for error, message in raises_on_ranks(2, strict, True, precision):
        assert error == "RuntimeError"
        assert "2.0-norm of the gradients is nan" in message or "2.0-norm of the gradients is inf" in message


def test_torch_notices_what_is_not_finite_too():
    for error, message in raises_on_ranks(2, strict, False, "bf16-mixed"):
        assert error == "RuntimeError"
        assert "non-finite" in message


class Tolerant(Strict):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, CLIP, "norm")


def tolerant():
    torch.manual_seed(1)
    module = Tolerant(True)
    fit_in("bf16-mixed", module)
    return [math.isfinite(norm) for _, norm in module.norms[:2]]


def test_without_it_training_goes_on_as_with_torch():
    assert run_on_ranks(2, tolerant) == [[True, False]] * 2
