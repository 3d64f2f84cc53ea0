"""ShardedWeightAveraging beside torch's AveragedModel and Lightning's callback, and runs that resume with averages."""

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from lightning_chunkmbs import ShardedWeightAveraging
from tests.models import Loader
from tests.ranks import raises_on_ranks, run_on_ranks
from tests.state_models import Stepped, assert_engaged, lockstep, micro_batches, train
from tests.strategy_models import (
    PARTS,
    Toy,
    apart,
    build,
    chunked,
    full,
    loader,
    parameters,
    trainer_of,
    whole_batches,
)

CLOSE = 2e-6
WINDOW = 2
SAMPLES = 48  # three windows of two ranks
DECAY = 0.7
FORMATS = pytest.mark.parametrize("distributed", [True, False], ids=["sharded", "full"])


class Mixed(Toy):
    """A frozen layer, tied weights, a parameter that is held whole, and buffers of several kinds."""

    def __init__(self):
        super().__init__()
        self.model.embed.requires_grad_(False)
        self.model.output = self.model.head
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("moving", torch.zeros(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.ones(3) / 3, persistent=False)

    def loss(self, batch):
        return self.scale * super().loss(batch) + self.moving.square().sum()

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        self.moved()

    def moved(self):
        self.moving += torch.tensor([1.0, -0.5])
        self.steps += 1


class Recorder(Callback):
    """Keeps the module's values after each optimizer step, and those that validation saw."""

    def __init__(self):
        self.steps, self.shown = [], []
        self.global_step = 0

    def on_train_start(self, trainer, module):
        self.global_step = trainer.global_step

    def on_train_batch_end(self, trainer, module, *_args):
        if trainer.global_step > self.global_step:
            self.global_step = trainer.global_step
            self.steps.append(values(module))

    def on_validation_epoch_end(self, trainer, module):
        self.shown.append(values(module))


def values(module):
    return parameters(module) | {name: b.clone() for name, b in module.named_buffers()}


def strategy_for(precision, distributed=True):
    cast = {"fsdp_plan": {"cast_forward_inputs": True}} if precision == "bf16-true" else {}
    return chunked(save_distributed_checkpoint=distributed, **cast)


def fit(module, averaging, strategy=None, ckpt_path=None, **options):
    """Train on two ranks' lockstep windows, with a validation after each micro-batch."""
    options = {"accumulate_grad_batches": WINDOW, "limit_val_batches": 1, "val_check_interval": 1} | options
    strategy = strategy or strategy_for(options.get("precision"))
    callbacks = [averaging, *options.pop("callbacks", [])]
    trainer = trainer_of(strategy, callbacks=callbacks, **options)
    trainer.fit(module, loader(SAMPLES), loader(SAMPLES), ckpt_path=ckpt_path)
    assert trainer.strategy.step_report.chunks == 3 * PARTS * WINDOW
    assert trainer.strategy.step_report.blocks == 3  # each gathered once for its window
    return trainer


# -- against torch -----------------------------------------------------------------------------------------------------


def plainly(decay, epochs):
    """One process, whole batches and torch's AveragedModel; the losses that validation sees after micro-batches."""
    module = build(Mixed)
    optimizer = module.configure_optimizers()
    averaged = AveragedModel(module, avg_fn=None if decay is None else get_ema_avg_fn(decay), use_buffers=False)
    first, scores = next(iter(loader(SAMPLES))), []
    moving = None
    for _ in range(epochs):
        for batch in whole_batches(SAMPLES, PARTS * WINDOW):
            shown = module if moving is None else averaged.module
            for _ in range(WINDOW - 1):  # inside a window nothing has changed since its start
                scores.append(shown.loss(first).item())
            optimizer.zero_grad()
            module.loss(batch).backward()
            module.moved()
            optimizer.step()
            averaged.update_parameters(module)
            count = int(averaged.n_averaged)
            weight = 1 / count if decay is None else 1 - decay
            moving = module.moving.clone() if moving is None else moving + weight * (module.moving - moving)
            averaged.module.moving.copy_(moving)
            scores.append(averaged.module.loss(first).item())
    return module, averaged.module, scores


def equals_torch(decay):
    module, averaging = build(Mixed), ShardedWeightAveraging(decay)
    fit(module, averaging, max_epochs=2)
    trained, averaged, scores = plainly(decay, 2)
    assert module.scores == pytest.approx(scores, abs=CLOSE)
    found = {name: full(value) for name, value in averaging._trained.items()}
    expected = parameters(trained) | {"moving": trained.moving}
    assert found.keys() == {name for name in expected if "embed" not in name}
    assert apart(found, {name: expected[name] for name in found}) < CLOSE
    assert apart(parameters(module), parameters(averaged)) < CLOSE
    assert (module.moving - averaged.moving).abs().max() < CLOSE
    assert module.steps == 6
    assert torch.equal(module.table, torch.ones(3) / 3)


@pytest.mark.parametrize("decay", [DECAY, None])
def test_averages_are_those_of_torch(decay):
    run_on_ranks(2, equals_torch, decay)


class Stock(Stepped):
    def validation_step(self, batch, batch_idx):
        self.log("score", self.loss(*batch, batch_idx))


class Scores(Callback):
    def __init__(self):
        self.scores = []

    def on_validation_end(self, trainer, module):
        self.scores.append(trainer.callback_metrics["score"].item())


def validated(averaging, strategy):
    module, scores = build(Stock), Scores()
    module.val_dataloader = lambda: Loader(micro_batches()[:1])
    options = {"limit_val_batches": 1, "val_check_interval": 2, "max_epochs": 2}
    train(module, strategy, callbacks=[averaging, scores], **options)
    return module, scores.scores


def equals_lightning():
    options = {"decay": DECAY, "update_every_n_steps": 2}
    ours, our_scores = validated(ShardedWeightAveraging(**options), lockstep())
    theirs, their_scores = validated(EMAWeightAveraging(**options), "auto")
    assert_engaged(ours, windows=4)
    assert our_scores == pytest.approx(their_scores, abs=CLOSE)
    assert len(our_scores) == 8
    assert apart(parameters(ours), parameters(theirs)) < CLOSE


def test_averages_are_those_of_lightning():
    run_on_ranks(1, equals_lightning)


# -- precision, updates ------------------------------------------------------------------------------------------------


def averages_of_the_values(precision):
    module, recorder = build(Mixed), Recorder()
    averaging = ShardedWeightAveraging(DECAY, update_every_n_steps=2, update_starting_at_step=1)
    fit(module, averaging, max_epochs=2, precision=precision, callbacks=[recorder])
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16 if precision == "bf16-true" else torch.float32}
    # Steps of indices 2 and 4 update; each validation after a step sees the averages, those before see the values.
    first, last = recorder.steps[2], recorder.steps[4]
    for name, average in averaging._averages.items():
        assert average.dtype == torch.float32
        expected = first[name].float().lerp(last[name].float(), 1 - DECAY)
        assert torch.equal(full(average), expected), name
        assert torch.equal(values(module)[name], expected.to(first[name].dtype)), name
        assert torch.equal(full(averaging._trained[name]), recorder.steps[5][name]), name
        assert not torch.equal(expected.to(first[name].dtype), recorder.steps[5][name]), name
    after = recorder.shown[1::2]
    seen = [apart(shown, step) for shown, step in zip(after, recorder.steps, strict=True)]
    assert seen[:3] == [0, 0, 0]  # no average yet, and then the first, which is a copy
    assert min(seen[3:]) > 0
    averaged_once = {name: recorder.steps[2][name] for name in averaging._averages}
    assert apart({name: after[3][name] for name in averaged_once}, averaged_once) == 0
    assert [int(shown["steps"]) for shown in after] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_averages_are_kept_in_float32(precision):
    run_on_ranks(2, averages_of_the_values, precision)


class Unfreezing(Toy):
    """The first layer is trained from the second epoch on."""

    def __init__(self):
        super().__init__()
        self.model.embed.requires_grad_(False)

    def on_train_epoch_start(self):
        self.model.embed.requires_grad_(self.current_epoch > 0)


def unfrozen():
    module, recorder, averaging = build(Unfreezing), Recorder(), ShardedWeightAveraging(DECAY)
    start = parameters(module)["model.embed.weight"]
    fit(module, averaging, chunked(), max_epochs=2, callbacks=[recorder])
    expected = start
    for step in recorder.steps:
        expected = expected.lerp(step["model.embed.weight"], 1 - DECAY)
    assert not torch.equal(expected, start)
    assert torch.equal(parameters(module)["model.embed.weight"], expected)


def test_what_is_unfrozen_is_averaged_from_its_value_before():
    run_on_ranks(2, unfrozen)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def all_state(module, averaging):
    state = {f"shown {name}": value for name, value in values(module).items()}
    state |= {f"average {name}": full(a) for name, a in averaging._averages.items()}
    return state | {f"trained {name}": full(t) for name, t in averaging._trained.items()}


def resumed(distributed, precision, folder):
    options = {"precision": precision, "max_epochs": 3}
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=6)
    whole, averaging = build(Mixed), ShardedWeightAveraging(DECAY, update_starting_at_step=1)
    fit(
        whole, averaging, strategy_for(precision, distributed), callbacks=[saving], enable_checkpointing=True, **options
    )
    path = Path(folder, "step=6.ckpt")
    assert path.is_dir() == distributed

    torch.manual_seed(123)
    second, again = Mixed(), ShardedWeightAveraging(DECAY, update_starting_at_step=1)
    fit(second, again, strategy_for(precision, distributed), str(path), **options)
    assert apart(all_state(second, again), all_state(whole, averaging)) == 0
    assert second.scores == whole.scores[-len(second.scores) :]
    assert again._updates == averaging._updates


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@FORMATS
def test_a_resumed_run_equals_the_uninterrupted_one(distributed, precision, tmp_path):
    run_on_ranks(2, resumed, distributed, precision, str(tmp_path))


def resumed_after_the_end(distributed, precision, folder):
    options = {"precision": precision, "max_epochs": 1}
    whole, averaging = build(Mixed), ShardedWeightAveraging(DECAY, update_starting_at_step=1)
    trainer = fit(whole, averaging, strategy_for(precision, distributed), **options)
    path = Path(folder, "end.ckpt")
    trainer.save_checkpoint(path)
    assert path.is_dir() == distributed

    torch.manual_seed(123)
    second, again = Mixed(), ShardedWeightAveraging(DECAY, update_starting_at_step=1)
    third, further = build(Mixed), ShardedWeightAveraging(DECAY, update_starting_at_step=1)
    fit(third, further, strategy_for(precision), **options | {"max_epochs": 2})
    fit(second, again, strategy_for(precision, distributed), str(path), **options | {"max_epochs": 2})
    assert apart(all_state(second, again), all_state(third, further)) == 0
    assert len(second.scores) == len(whole.scores) > 0
    assert second.scores == third.scores[len(whole.scores) :]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@FORMATS
def test_a_run_that_goes_on_after_its_end_equals_a_longer_one(distributed, precision, tmp_path):
    run_on_ranks(2, resumed_after_the_end, distributed, precision, str(tmp_path))


def saved_by_two(distributed, folder):
    module, averaging = build(Mixed), ShardedWeightAveraging(DECAY)
    trainer = fit(module, averaging, strategy_for("bf16-true", distributed), precision="bf16-true")
    path = Path(folder, "two.ckpt")
    trainer.save_checkpoint(path)
    state = all_state(module, averaging)
    tested = build(Mixed)
    trainer_of(strategy_for("bf16-true"), callbacks=[ShardedWeightAveraging()], precision="bf16-true").test(
        tested, loader(SAMPLES), ckpt_path=str(path), verbose=False
    )
    assert apart(parameters(tested), parameters(module)) == 0
    if not distributed:
        bare = Mixed.load_from_checkpoint(path, map_location="cpu").to(torch.bfloat16)
        assert apart(parameters(bare), parameters(module)) == 0
    return state


class Loaded(Callback):
    def __init__(self, averaging):
        self.averaging = averaging

    def on_train_start(self, trainer, module):
        self.state = {f"trained {name}": value for name, value in values(module).items()}
        self.state |= {f"average {name}": full(a) for name, a in self.averaging._averages.items()}


def loaded_by_one(path, expected):
    averaging = ShardedWeightAveraging(DECAY)
    loaded = Loaded(averaging)
    trainer = trainer_of(strategy_for("bf16-true"), callbacks=[averaging, loaded], precision="bf16-true", max_epochs=2)
    trainer.fit(Mixed(), loader(SAMPLES), ckpt_path=path)
    names = {name for name in loaded.state if name in expected}
    assert {name for name in expected if not name.startswith("shown")} <= names
    assert apart({n: loaded.state[n] for n in names}, {n: expected[n] for n in names}) == 0
    assert averaging._updates == 3 + 12


@FORMATS
def test_averages_are_loaded_on_another_number_of_ranks_and_by_tests(distributed, tmp_path):
    expected, _ = run_on_ranks(2, saved_by_two, distributed, str(tmp_path))
    run_on_ranks(1, loaded_by_one, str(tmp_path / "two.ckpt"), expected)


class Failing(Mixed):
    fails = True

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if self.fails and len(self.scores) == 4:
            raise ValueError("no")


class Unfailing(Failing):
    fails = False


def fails_in_validation(folder):
    whole, averaging = build(Unfailing), ShardedWeightAveraging(DECAY)
    recorder = Recorder()
    fit(whole, averaging, max_epochs=2, callbacks=[recorder])

    first, saving = build(Failing), OnExceptionCheckpoint(folder)
    saving.teardown = lambda *_: None
    with pytest.raises(ValueError, match="no"):
        fit(first, ShardedWeightAveraging(DECAY), max_epochs=2, callbacks=[saving], enable_checkpointing=True)
    assert apart(values(first), recorder.steps[1]) == 0
    saved = ShardedWeightAveraging(DECAY)
    loaded = Loaded(saved)
    trainer_of(chunked(), callbacks=[saved, loaded]).fit(Unfailing(), loader(SAMPLES), ckpt_path=saving.ckpt_path)
    for name, average in saved._averages.items():
        moving = recorder.steps[0][name].lerp(recorder.steps[1][name], 1 - DECAY)
        assert torch.equal(loaded.state[f"average {name}"], moving), name
        assert torch.equal(loaded.state[f"trained {name}"], recorder.steps[1][name]), name
        assert average.shape == moving.shape


def test_a_failing_validation_leaves_the_trained_weights(tmp_path):
    run_on_ranks(2, fails_in_validation, str(tmp_path))


def without_averages(folder):
    first = build(Mixed)
    trainer = trainer_of(chunked())
    trainer.fit(first, loader(SAMPLES))
    trainer.save_checkpoint(Path(folder, "plain.ckpt"))
    module, averaging, recorder = build(Mixed), ShardedWeightAveraging(DECAY), Recorder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, averaging, None, str(Path(folder, "plain.ckpt")), max_epochs=2, callbacks=[recorder])
    told = [w for w in caught if "has no averages" in str(w.message)]
    assert len(told) == (1 if trainer.is_global_zero else 0)
    assert averaging._updates == len(recorder.steps) == 3


def test_averages_begin_in_a_resumed_run(tmp_path):
    run_on_ranks(2, without_averages, str(tmp_path))


# -- refused -----------------------------------------------------------------------------------------------------------


class OwnAveraging(WeightAveraging):
    def __init__(self):
        super().__init__(avg_fn=get_ema_avg_fn())


class Attaching(Mixed):
    def configure_callbacks(self):
        return [EMAWeightAveraging()]


class Untouched(Toy):
    def configure_model(self):
        raise AssertionError("the module was set up")


def fitted_with(callback, kind, strategy):
    strategy = chunked() if strategy == "ours" else strategy
    trainer_of(strategy, callbacks=[callback()] if callback else []).fit(build(kind), loader(SAMPLES))


@pytest.mark.parametrize(
    ("callback", "kind", "words"),
    [
        (WeightAveraging, Untouched, ["WeightAveraging", "ShardedWeightAveraging(decay=0.999)", "decay=None"]),
        (EMAWeightAveraging, Untouched, ["EMAWeightAveraging", "ShardedWeightAveraging(decay=0.999)"]),
        (OwnAveraging, Untouched, ["OwnAveraging", "ShardedWeightAveraging(decay=0.999)"]),
        (None, Attaching, ["EMAWeightAveraging", "ShardedWeightAveraging(decay=0.999)"]),
        (
            partial(StochasticWeightAveraging, swa_lrs=1e-2),
            Untouched,
            ["Stochastic", "ShardedWeightAveraging(decay=None)"],
        ),
    ],
    ids=["mean", "ema", "own", "attached", "swa"],
)
def test_averages_of_whole_models_are_refused(callback, kind, words):
    for error, message in raises_on_ranks(2, fitted_with, callback, kind, "ours"):
        assert error == "TypeError"
        assert all(word in message for word in words)
        assert "\n" not in message


def test_other_strategies_are_refused():
    [(error, message)] = raises_on_ranks(1, fitted_with, ShardedWeightAveraging, Toy, "auto")
    assert error == "TypeError"
    assert "SingleDeviceStrategy" in message


@pytest.mark.parametrize(
    "options", [{"decay": 1.5}, {"decay": -0.1}, {"update_every_n_steps": 0}, {"update_starting_at_step": -1}]
)
def test_impossible_arguments_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ShardedWeightAveraging(**options)


class Slower(ShardedWeightAveraging):
    """Has a class, and so a state in checkpoints, of its own."""


def average_twice():
    trainer_of(chunked(), callbacks=[ShardedWeightAveraging(0.9), Slower(0.99)]).fit(build(), loader())


def test_a_second_average_is_refused():
    for name, message in raises_on_ranks(2, average_twice):
        assert name == "ValueError"
        assert "2 callbacks that average: ShardedWeightAveraging, Slower. Keep one" in message
