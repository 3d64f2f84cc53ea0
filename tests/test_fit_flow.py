"""Runs one after the other on one module, and calls of the model outside steps."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from lightning_chunkmbs.block import ChunkedBlock
from tests.collectives import count_collectives
from tests.ranks import raises_on_ranks, run_on_ranks
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


def plain_scores(module):
    with torch.no_grad():
        return torch.tensor([module.loss(batch).item() for batch in loader()])


def scores_apart(module, expected):
    found = torch.tensor(module.scores)
    module.scores = []
    return (found - expected).abs().max().item()


# -- one run after the other -------------------------------------------------------------------------------------------


def one_fit():
    module = build()
    trainer = fit(module, max_epochs=2)
    plain = train_plainly(build(), epochs=2)
    assert len(module.seen) == len(plain.seen) == 6
    assert max(map(apart, module.seen, plain.seen)) < 1e-6
    assert apart(parameters(module), parameters(plain)) < CLOSE
    report = trainer.strategy.step_report
    assert module.reports == [report] * 6
    assert (report.all_gathers, report.reduce_scatters, report.blocks, report.chunks) == (7, 4, 3, 12)
    # Three blocks, and hidden states of [4, 3, 8] floats.
    assert (
        report.offloaded_bytes == report.reloaded_bytes == (3 * 4 - 1) * 3 * 8 * 4
    )  # the chunk that backward needs first stays
    assert all_sharded(module)
    assert live_bytes(trainer) == 0


def fit_with_evaluations(same_trainer):
    module, plain = build(), build()
    trainer = trainer_of(chunked(), limit_val_batches=3)
    another = (lambda: trainer) if same_trainer else (lambda: trainer_of(chunked(), limit_val_batches=3))

    trainer.fit(module, loader())
    applied, layer_type, hooks = trainer.strategy._applied, type(module.model.layers[0]), len(module._forward_hooks)
    train_plainly(plain)
    another().validate(module, loader(), verbose=False)
    assert scores_apart(module, plain_scores(plain)) < CLOSE
    another().test(module, loader(), verbose=False)
    assert scores_apart(module, plain_scores(plain)) < CLOSE
    assert all_sharded(module)
    last = another()
    last.fit_loop.max_epochs = 2 if same_trainer else 1
    last.fit(module, loader())
    train_plainly(plain)

    assert len(module.seen) == 6
    assert max(map(apart, module.seen, plain.seen)) < 1e-6
    assert apart(parameters(module), parameters(plain)) < CLOSE
    assert [(r.all_gathers, r.reduce_scatters, r.chunks) for r in module.reports] == [(7, 4, 12)] * 6
    assert last.strategy._applied is applied
    assert type(module.model.layers[0]) is layer_type
    assert layer_type.__mro__.count(ChunkedBlock) == 1
    assert len(module._forward_hooks) == hooks


def validation_in_mid_epoch():
    module, plain = build(), train_plainly(build())
    trainer = fit_validating(module)
    assert len(module.scores) == 9  # three batches after each of three steps
    assert apart(parameters(module), parameters(plain)) < CLOSE
    # Gathers of validation are no part of a step.
    assert [r.all_gathers for r in module.reports] == [7] * 3
    module.scores = module.scores[6:]
    assert scores_apart(module, plain_scores(plain)) < CLOSE
    assert live_bytes(trainer) == 0


def fit_validating(module):
    trainer = trainer_of(chunked(), limit_val_batches=3, val_check_interval=1)
    trainer.fit(module, loader(), loader())
    return trainer


def validate_and_predict_before_fit():
    module, plain = build(), build()
    trainer = trainer_of(chunked(), limit_val_batches=3)
    with count_collectives() as counted:
        trainer.validate(module, loader(), verbose=False)
    assert scores_apart(module, plain_scores(plain)) < CLOSE
    assert counted.all_gathers == 3 * 4  # one for each group and batch, nothing kept gathered for a backward pass
    assert all_sharded(module)
    predicted = trainer.predict(module, loader())
    expected = [plain.model(x) for x, _ in loader()]
    assert len(predicted) == 3
    assert max((a - b).abs().max().item() for a, b in zip(predicted, expected, strict=True)) < CLOSE
    trainer.fit(module, loader())
    assert apart(parameters(module), parameters(train_plainly(plain))) < CLOSE


def shards_written_after_validation():
    module, plain = build(), build()
    trainer = trainer_of(chunked(), limit_val_batches=3)
    trainer.validate(module, loader(), verbose=False)
    module.scores = []
    halved = {name: value / 2 for name, value in plain.state_dict().items()}
    plain.load_state_dict(halved)
    set_model_state_dict(module, halved, options=StateDictOptions(full_state_dict=True))
    trainer.validate(module, loader(), verbose=False)
    assert scores_apart(module, plain_scores(plain)) < CLOSE
    trainer.fit(module, loader())
    train_plainly(plain)
    assert max(map(apart, module.seen, plain.seen)) < 1e-6

    with torch.no_grad():
        for p in (*module.parameters(), *plain.parameters()):
            p.mul_(1.5)  # as an optimizer writes, into the shards
    module.seen, plain.seen = [], []
    trainer_of(chunked()).fit(module, loader())
    train_plainly(plain)
    assert max(map(apart, module.seen, plain.seen)) < 1e-6


def other_plans_for_the_same_module():
    module = build()
    fit(module, limit_train_batches=1)
    fit(module, chunked(chunkmbs_plan={"apply_modules": ["model.layers.{*}"], "chunk_mbs": 2}))


def test_a_fit_equals_plain_training():
    run_on_ranks(2, one_fit)


@pytest.mark.parametrize("same_trainer", [True, False], ids=["one trainer", "a trainer each"])
def test_fit_validate_test_fit_equals_fit_fit(same_trainer):
    run_on_ranks(2, fit_with_evaluations, same_trainer)


def test_validation_in_mid_epoch_changes_nothing():
    run_on_ranks(2, validation_in_mid_epoch)


def test_validate_and_predict_come_before_fit():
    run_on_ranks(2, validate_and_predict_before_fit)


def test_shards_written_after_a_validation_are_used():
    run_on_ranks(2, shards_written_after_validation)


def test_a_module_keeps_its_plans():
    for kind, message in raises_on_ranks(2, other_plans_for_the_same_module):
        assert kind == "RuntimeError"
        assert "Toy was given others now. Build a new module" in message


# -- calls outside steps -----------------------------------------------------------------------------------------------


class Calling(Toy):
    """Calls the model in hooks, in the ways that users do."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.called = {}

    def forward(self, x):
        return self.model(x)

    def repeated(self, x):
        """Like generate(): feeds the model what it returned."""
        for _ in range(3):
            x = torch.cat([self.model(x), x[..., :2]], -1)
        return x

    def answer(self, hook):
        x = next(iter(loader()))[0]
        ways = {"root": self, "child": self.model, "repeated": self.repeated, "gathered": self.inside}
        self.called[hook] = ways[self.way](x).detach()
        self.called[hook + " sharded"] = not torch.is_grad_enabled() and not all_sharded(self)

    def inside(self, x):
        with self.trainer.strategy.gathered():
            head = self.model.head.weight
            assert head.shape == (2, 8)
            assert type(head.data) is torch.Tensor  # and not a shard
            return self.repeated(x)

    def on_validation_epoch_end(self):
        self.answer("validation")

    def on_train_epoch_end(self):
        with torch.no_grad():
            self.answer("train")
        self.answer("train with gradients")


def calls_in_hooks(way):
    module, plain = build(Calling, way), build(Calling, way)
    trainer = trainer_of(chunked(), limit_val_batches=1, max_epochs=2)
    trainer.fit(module, loader(), loader())
    assert apart(parameters(module), parameters(train_plainly(plain, epochs=2))) < CLOSE
    x = next(iter(loader()))[0]
    expected = plain.model(x) if way in ("root", "child") else plain.repeated(x)
    for hook in ("validation", "train", "train with gradients"):
        assert (module.called[hook] - expected).abs().max() < 1e-5, hook
        assert not module.called[hook + " sharded"], hook
    assert [(r.all_gathers, r.chunks) for r in module.reports] == [(7, 12)] * 6
    assert live_bytes(trainer) == 0


@pytest.mark.parametrize("way", ["root", "child", "repeated", "gathered"])
def test_the_model_can_be_called_in_hooks(way):
    run_on_ranks(2, calls_in_hooks, way)
