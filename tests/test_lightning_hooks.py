"""Lightning's hooks and overrides around a step, and what a step may return."""

from tests.collectives import count_collectives
from tests.ranks import run_on_ranks
from tests.strategy_models import (
    Toy,
    all_sharded,
    apart,
    build,
    fit,
    gradients,
    parameters,
    train_plainly,
    whole_batches,
)

CLOSE = 2e-6


class Hooked(Toy):
    """Overrides what Lightning lets a module override around the optimizer step."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.after_backward = []

    def training_step(self, batch, batch_idx):
        self.calls.append("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_backward(self, loss):
        self.calls.append("on_before_backward")
        assert loss.requires_grad
        assert all(p.grad is None for p in self.parameters())

    def backward(self, loss, *args, **kwargs):
        self.calls.append("backward")
        super().backward(2 * loss, *args, **kwargs)

    def on_after_backward(self):
        self.calls.append("on_after_backward")
        assert all_sharded(self)
        self.after_backward.append(gradients(self))

    def on_before_optimizer_step(self, optimizer):
        self.calls.append("on_before_optimizer_step")
        super().on_before_optimizer_step(optimizer)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.calls.append("configure_gradient_clipping")
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        self.calls.append("optimizer_step")
        optimizer.step(closure=optimizer_closure)
        self.calls.append("stepped")

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.calls.append("optimizer_zero_grad")
        optimizer.zero_grad()


class Doubled(Toy):
    def loss(self, batch):
        return 2 * super().loss(batch)


def hooks_in_order():
    module, plain, clipped = build(Hooked), build(Doubled), build(Doubled)
    with count_collectives() as counted:
        trainer = fit(module)
    train_plainly(clipped, clip=0.1)
    assert (
        module.calls
        == [
            "optimizer_step",
            "training_step",
            "optimizer_zero_grad",
            "on_before_backward",
            "backward",
            "on_after_backward",
            "on_before_optimizer_step",
            "configure_gradient_clipping",
            "stepped",
        ]
        * 3
    )
    assert apart(module.after_backward[0], train_plainly(plain).seen[0]) < 1e-6
    assert max(map(apart, module.seen, module.after_backward)) == 0  # Lightning clips after that hook
    assert apart(parameters(module), parameters(clipped)) < CLOSE
    assert apart(parameters(clipped), parameters(plain)) > 1e-4, "clipping did nothing"
    assert counted.reduce_scatters == 3 * 4
    assert trainer.strategy.step_report.chunks == 12


class Skipping(Toy):
    """Skips every second step."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) if batch_idx % 2 == 0 else None


class WithDict(Toy):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return {"loss": loss, "extra": [loss.detach()]}


def step_that_returns_a_dict():
    module = build(WithDict)
    trainer = fit(module)
    assert apart(parameters(module), parameters(train_plainly(build()))) < CLOSE
    assert trainer.callback_metrics["loss_epoch"] > 0
    assert trainer.strategy.step_report.chunks == 12


def steps_that_return_none():
    module = build(Skipping)
    trainer = fit(module, max_epochs=2)
    kept = [batch for i, batch in enumerate(whole_batches()) if i % 2 == 0]
    assert len(kept) == 3
    assert apart(parameters(module), parameters(train_plainly(build(), kept, epochs=2))) < CLOSE
    assert [r.chunks for r in module.reports] == [12, 0] * 6
    assert trainer.strategy.step_report.all_gathers == 0  # one rank gathers nothing


def test_hooks_run_in_the_order_of_lightning_and_see_complete_gradients():
    run_on_ranks(2, hooks_in_order)


def test_a_step_may_return_a_dict():
    run_on_ranks(2, step_that_returns_a_dict)


def test_a_step_may_return_none():
    run_on_ranks(1, steps_that_return_none)  # with several ranks Lightning refuses it
