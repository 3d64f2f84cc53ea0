"""Manual optimization: the model is gathered during a step that itself runs backward passes and optimizers."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from tests.ranks import run_on_ranks
from tests.strategy_models import (
    LAYERS,
    Block,
    Net,
    Toy,
    all_sharded,
    apart,
    build,
    chunked,
    fit,
    live_bytes,
    loader,
    parameters,
    trainer_of,
    whole_batches,
)

CLOSE = 2e-6


class Manual(Toy):
    """``work`` is what a training step does; the oracle runs it without a Trainer."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.work(batch, self.optimizers(), self.manual_backward)

    def work(self, batch, optimizer, backward):
        optimizer.zero_grad()
        backward(self.loss(batch))
        optimizer.step()

    @contextmanager
    def toggled(self, optimizer):
        if self._trainer is None:
            others = [
                p for p in self.parameters() if all(p is not q for g in optimizer.param_groups for q in g["params"])
            ]
            for p in others:
                p.requires_grad_(False)
            yield
            for p in others:
                p.requires_grad_(True)
        else:
            self.toggle_optimizer(optimizer)
            yield
            self.untoggle_optimizer(optimizer)

    def saw(self, loss):
        """Keep a loss that is the same whatever the ranks are."""
        self.losses.append(loss.detach().clone())
        return loss

    def on_before_optimizer_step(self, optimizer):
        pass


def work_plainly(module, epochs=2):
    optimizers = module.configure_optimizers()
    for _ in range(epochs):
        for batch in whole_batches():
            module.work(batch, optimizers, torch.Tensor.backward)
    return module


class SeveralBackwards(Manual):
    """Two passes, one backward each, and a penalty on parameters of the root group; one step for all."""

    def work(self, batch, optimizer, backward):
        x, y = batch
        optimizer.zero_grad()
        backward(self.loss(batch))
        backward(0.1 * self.model.head.weight.square().sum())
        backward(self.loss((x.flip(1), y)) / 2)
        optimizer.step()


class OneGraphTwice(Manual):
    """Two backward passes over one forward pass."""

    def work(self, batch, optimizer, backward):
        x, y = batch
        optimizer.zero_grad()
        prediction = self.model(x)
        if self._trainer is None:
            ((prediction - y).square().mean() + prediction.abs().mean()).backward()
        else:
            self.manual_backward((prediction - y).square().mean(), retain_graph=True)
            self.manual_backward(prediction.abs().mean())
        optimizer.step()


class StepAndLookAgain(Manual):
    """The model called after a step has the new weights, in the blocks and outside."""

    def work(self, batch, optimizer, backward):
        for _ in range(2):
            optimizer.zero_grad()
            backward(self.loss(batch))
            optimizer.step()
            with torch.no_grad():
                self.looked = self.loss(batch)
        optimizer.zero_grad()
        backward(self.loss(batch) + self.model.embed.weight.abs().sum())
        optimizer.step()


class RootOnly(Manual):
    """The loss reaches no block; every second step reaches them all."""

    count = 0

    def work(self, batch, optimizer, backward):
        x, y = batch
        optimizer.zero_grad()
        self.count += 1
        short = self.model.head(self.model.norm(self.model.embed(x)))
        backward((short - y).square().mean() if self.count % 2 else self.loss(batch))
        optimizer.step()


class NoStep(Manual):
    """Gradients gather over two training steps."""

    count = 0

    def work(self, batch, optimizer, backward):
        self.count += 1
        backward(self.loss(batch) / 2)
        if self.count % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


class EvaluateFirst(Manual):
    """A pass without gradients before the one that trains, and one whose graph is dropped."""

    def work(self, batch, optimizer, backward):
        with torch.no_grad():
            weight = 1 / (1 + self.loss(batch))
        self.loss(batch)
        optimizer.zero_grad()
        backward(weight.detach() * 0 + self.loss(batch))
        optimizer.step()


class ZeroGradOfModule(Manual):
    """Clears gradients through the module and not through the optimizer."""

    def work(self, batch, optimizer, backward):
        backward(self.loss(batch))
        optimizer.step()
        self.zero_grad()


class Clipping(Manual):
    """Clips inside the step."""

    def work(self, batch, optimizer, backward):
        optimizer.zero_grad()
        backward(self.loss(batch))
        if self._trainer is None:
            nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        else:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()


def manual(kind):
    module, plain = build(kind), work_plainly(build(kind))
    start = parameters(build(kind))
    trainer = fit(module, max_epochs=2)
    assert apart(parameters(plain), start) > 1e-3, "the oracle did not train"
    assert apart(parameters(module), parameters(plain)) < CLOSE
    assert all_sharded(module)
    assert live_bytes(trainer) == 0
    assert trainer.strategy.step_report.chunks >= 12
    assert trainer.strategy.step_report.offloaded_bytes > 0
    assert trainer.global_step > 0


def test_gathers_of_a_step():
    for all_gathers, reduce_scatters in run_on_ranks(2, collectives_of_a_step):
        # The step ends with the root gathered again, once after backward for what follows and once for new weights.
        assert 7 <= all_gathers <= 9
        assert reduce_scatters == 4


def collectives_of_a_step():
    trainer = fit(build(Manual))
    report = trainer.strategy.step_report
    return report.all_gathers, report.reduce_scatters


@pytest.mark.parametrize(
    "kind",
    [
        Manual,
        SeveralBackwards,
        OneGraphTwice,
        StepAndLookAgain,
        RootOnly,
        NoStep,
        EvaluateFirst,
        Clipping,
        ZeroGradOfModule,
    ],
)
def test_a_manual_step_equals_one_process(kind):
    run_on_ranks(2, manual, kind)


# -- several optimizers ------------------------------------------------------------------------------------------------


class Adversaries(Manual):
    """A generator and a discriminator, in the order of steps of Lightning's example (zero_grad after the step)."""

    toggles = True

    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(2, 8), Block(), Block(), nn.Linear(8, 1))

    def configure_optimizers(self):
        return [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (self.model, self.critic)]

    def work(self, batch, optimizers, backward):
        x, y = batch
        generator, critic = optimizers
        with self.only(generator):
            backward((self.critic(self.model(x)) - 1).square().mean())
            generator.step()
            generator.zero_grad()
        with self.only(critic):
            backward(((self.critic(y) - 1).square().mean() + self.critic(self.model(x).detach()).square().mean()) / 2)
            critic.step()
            critic.zero_grad()

    def only(self, optimizer):
        return self.toggled(optimizer) if self.toggles else nullcontext()


class Untoggled(Adversaries):
    """Without toggling the generator's pass leaves gradients in the critic; zero_grad removes them."""

    toggles = False

    def work(self, batch, optimizers, backward):
        optimizers[1].zero_grad()
        optimizers[0].zero_grad()
        super().work(batch, optimizers, backward)


ADVERSARIES = {"apply_modules": [LAYERS, "critic.{1-2}"], "chunk_mbs": 1}


def adversaries(kind):
    module, plain = build(kind), work_plainly(build(kind))
    trainer = trainer_of(chunked(chunkmbs_plan=ADVERSARIES), max_epochs=2, limit_val_batches=1)
    trainer.fit(module, loader(), loader())
    assert trainer.global_step == 12
    assert apart(parameters(module), parameters(plain)) < CLOSE
    assert all(p.requires_grad for p in module.parameters())
    assert live_bytes(trainer) == 0
    report = trainer.strategy.step_report  # of the critic's step
    assert report.chunks == 2 * 2 * 4 + 3 * 4
    assert report.offloaded_bytes > 0


class TogglingOnce(Adversaries):
    def work(self, batch, optimizers, backward):
        x, y = batch
        self.with_gradients = []
        for optimizer in optimizers:
            with self.toggled(optimizer):
                backward(self.critic(self.model(x)).mean() + self.critic(y).mean())
            held = [o.param_groups[0]["params"] for o in optimizers]
            self.with_gradients.append([sum(p.grad is not None for p in params) for params in held])
            for o in optimizers:
                o.zero_grad()


def toggled_off():
    """Parameters of the optimizer that is toggled off get no gradient."""
    module = build(TogglingOnce)
    fit(module, chunked(chunkmbs_plan=ADVERSARIES), limit_train_batches=1)
    sizes = [len(list(m.parameters())) for m in (module.model, module.critic)]
    assert module.with_gradients == [[sizes[0], 0], [0, sizes[1]]]


@pytest.mark.parametrize("kind", [Adversaries, Untoggled])
def test_two_optimizers_equal_one_process(kind):
    run_on_ranks(2, adversaries, kind)


def test_a_toggled_optimizer_alone_gets_gradients():
    run_on_ranks(2, toggled_off)


class ManualInBlocks(Manual):
    """Blocks of another model, called in a loop of the step itself."""

    def __init__(self):
        super().__init__()
        self.model = Net(2)

    def work(self, batch, optimizer, backward):
        x, y = batch
        optimizer.zero_grad()
        hidden = self.model.embed(x)
        for _ in range(2):
            for layer in self.model.layers:
                hidden = layer(hidden)
        backward((self.model.head(self.model.norm(hidden)) - y).square().mean())
        optimizer.step()


def test_blocks_called_twice_in_a_step():
    run_on_ranks(2, manual, ManualInBlocks)
