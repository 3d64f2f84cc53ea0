"""Lightning's callbacks, profilers, loggers and tuner with windows, beside the same run under Lightning's strategy."""

import re
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    OnExceptionCheckpoint,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from tests.lockstep_models import (
    BATCH,
    BATCHES,
    BLOCKS,
    Lm,
    assert_close,
    build,
    collate,
    full,
    our_strategy,
    sample,
    stock_strategy,
    trainer_of,
    windows_of,
)
from tests.ranks import raises_on_ranks, run_on_ranks

N = 4
CLOSE = 1e-6
TIMED = re.compile("per_sec|time|DeviceStats")  # values that are another in every run


def parameters(module):
    return {name: full(p).detach().clone() for name, p in module.named_parameters()}


def engaged(module, windows):
    assert [r.blocks for r in module.reports] == [BLOCKS] * len(windows)
    assert [r.all_gathers for r in module.reports] == [2 * BLOCKS + 1] * len(windows)


def both(kind, folder, fitted, **options):
    """Train with ours and with stock; each is (module, trainer, parameters)."""
    runs = []
    for stock in (False, True):
        module = build(kind, stock)
        callbacks = [make() for make in options.get("callbacks", [])]
        logger = options["logger"](f"{folder}/{'stock' if stock else 'ours'}") if "logger" in options else False
        profiler = options["profiler"]() if "profiler" in options else None
        settings = {"accumulate_grad_batches": N, **options, "callbacks": [], "logger": logger, "profiler": profiler}
        settings["default_root_dir"] = folder
        trainer = trainer_of(stock_strategy() if stock else our_strategy(), **settings)
        trainer.callbacks = trainer._callback_connector._reorder_callbacks([*trainer.callbacks, *callbacks])
        fitted(trainer, module)
        runs.append((module, trainer, parameters(module)))
    (_, our_trainer, ours), (_, stock_trainer, stock) = runs
    assert our_trainer.global_step == stock_trainer.global_step > 0
    assert our_trainer.current_epoch == stock_trainer.current_epoch
    assert_close(ours, stock)
    return runs


def fit(trainer, module):
    trainer.fit(module)


# -- callbacks that log ------------------------------------------------------------------------------------------------


class Measured(Lm):
    flops_per_batch = 1000

    def on_validation_epoch_end(self):
        self.validations = getattr(self, "validations", 0) + 1
        self.log("score", float(abs(self.validations - 2)))


class Events(TensorBoardLogger):
    """Keeps under each tag what was written."""

    def events(self):
        found = EventAccumulator(self.log_dir)
        found.Reload()
        return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def size_of(batch):
    return len(batch["tokens"])


def length_of(batch):
    return batch["tokens"].numel()


def logged(folder):
    callbacks = [
        partial(LearningRateMonitor, "step"),
        partial(ThroughputMonitor, size_of, length_of, window_size=3),
        DeviceStatsMonitor,
        partial(Timer, {"hours": 1}),
        partial(EarlyStopping, "score", patience=1, check_on_train_epoch_end=False),
    ]
    options = {"max_epochs": 5, "limit_val_batches": 2, "detect_anomaly": True, "log_every_n_steps": 1}
    (ours, our_trainer, _), (theirs, stock_trainer, _) = both(
        Measured, folder, fit, callbacks=callbacks, logger=Events, **options
    )
    engaged(ours, windows_of(BATCHES, N) * 3)
    stops = [t.early_stopping_callback.stopped_epoch for t in (our_trainer, stock_trainer)]
    assert stops[0] == stops[1] == 2
    assert ours.rates == theirs.rates
    if dist.get_rank():
        return []
    mine, stock = our_trainer.logger.events(), stock_trainer.logger.events()
    assert mine.keys() == stock.keys()
    for tag, events in stock.items():
        assert [step for step, _ in mine[tag]] == [step for step, _ in events], tag
        if not TIMED.search(tag):
            assert [v for _, v in mine[tag]] == pytest.approx([v for _, v in events], rel=1e-5), tag
    return sorted(mine)


def test_callbacks_log_and_stop_as_with_stock(tmp_path):
    tags, _ = run_on_ranks(2, logged, str(tmp_path))
    for name in ("lr-AdamW", "train/batches", "train/samples", "loss_step", "loss_epoch", "val_loss", "score"):
        assert name in tags
    assert any("DeviceStats" in tag for tag in tags)
    assert "train/device/samples_per_sec" in tags


# -- profilers, short runs ---------------------------------------------------------------------------------------------


def profiled(kind, folder):
    make = {
        "simple": lambda: SimpleProfiler(dirpath=folder, filename="profile"),
        "pytorch": lambda: PyTorchProfiler(dirpath=folder, filename="profile", emit_nvtx=False),
    }[kind]
    (ours, our_trainer, _), (_, stock_trainer, _) = both(Lm, folder, fit, profiler=make)
    engaged(ours, windows_of(BATCHES, N))
    if kind == "simple":
        mine, stock = (
            {a.partition("Strategy]")[2]: len(d) for a, d in t.profiler.recorded_durations.items() if "Strategy]" in a}
            for t in (our_trainer, stock_trainer)
        )
        mine, stock = ({a.partition(".")[2]: n for a, n in counts.items()} for counts in (mine, stock))
        assert mine == stock
        assert mine["training_step"] == BATCHES
        assert mine["backward"] == BATCHES
    written = list(Path(folder).glob("*profile*"))
    return [path.name for path in written if path.stat().st_size > 0]


@pytest.mark.parametrize("kind", ["simple", "pytorch"])
def test_profilers_count_what_stock_counts(kind, tmp_path):
    first, _ = run_on_ranks(2, profiled, kind, str(tmp_path))
    assert first


def quick(folder):
    options = {"fast_dev_run": True, "limit_val_batches": 1.0, "logger": CSVLogger, "max_epochs": 1}
    (ours, our_trainer, _), _ = both(Lm, folder, fit, **options)
    engaged(ours, [1])
    assert our_trainer.global_step == 1
    (ours, our_trainer, _), _ = both(Lm, folder, fit, **options | {"fast_dev_run": 5})
    engaged(ours, windows_of(5, N))
    return our_trainer.global_step


def test_fast_dev_run(tmp_path):
    assert run_on_ranks(2, quick, str(tmp_path)) == [2, 2]


class Nan(Lm):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        zero = (loss * 0).abs()
        return loss + (zero.sqrt() if batch_idx == 2 else zero).sum()  # an infinite slope times zero


def anomalous():
    trainer_of(our_strategy(), accumulate_grad_batches=N, detect_anomaly=True).fit(build(Nan))


def test_anomalies_are_found_inside_a_window():
    for error, message in raises_on_ranks(2, anomalous):
        assert error == "RuntimeError"
        assert "AbsBackward0" in message


# -- checkpoints written by callbacks ----------------------------------------------------------------------------------


class Interrupted(Lm):
    at = 5

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == self.at and self.current_epoch == 1:
            raise ValueError("interrupted")


class Going(Interrupted):
    at = None


def saved_on_exception(folder):
    states = []
    for stock in (False, True):
        saving = OnExceptionCheckpoint(folder, f"stock {stock}")
        saving.teardown = lambda *_: None
        module = build(Interrupted, stock)
        options = {"accumulate_grad_batches": N, "max_epochs": 2, "enable_checkpointing": True, "callbacks": []}
        trainer = trainer_of(stock_strategy() if stock else our_strategy(), **options)
        trainer.callbacks.append(saving)
        with pytest.raises(ValueError, match="interrupted"):
            trainer.fit(module)
        dist.barrier()
        states.append(torch.load(saving.ckpt_path, weights_only=False))
    mine, stock = states
    assert mine["global_step"] == stock["global_step"] == 3
    assert (
        mine["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        == stock["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    )
    assert_close(mine["state_dict"], stock["state_dict"])
    return True


def test_a_checkpoint_is_saved_on_an_exception(tmp_path):
    assert all(run_on_ranks(2, saved_on_exception, str(tmp_path)))


# -- the tuner ---------------------------------------------------------------------------------------------------------


class Tuned(Lm):
    total_steps = 100

    def __init__(self):
        super().__init__()
        self.lr = 1e-2
        self.batch_size = BATCH

    def train_dataloader(self):
        return DataLoader([sample(i) for i in range(64)], batch_size=self.batch_size, collate_fn=collate)


def uncounted(strategy):
    """Stock's strategy; the checkpoint that the tuner saves before the first step makes its Adam count a step more."""
    optimizer_state = strategy.optimizer_state

    def and_forgotten(optimizer):
        state = optimizer_state(optimizer)
        getattr(optimizer, "_optimizer", optimizer).state.clear()
        return state

    strategy.optimizer_state = and_forgotten
    return strategy


def find_rate(distributed, n):
    results = []
    for stock in (False, True):
        module = build(Tuned, stock)
        before = parameters(module)
        strategy = uncounted(stock_strategy()) if stock else our_strategy(save_distributed_checkpoint=distributed)
        trainer = trainer_of(strategy, accumulate_grad_batches=n, default_root_dir=tempfile.mkdtemp())
        found = Tuner(trainer).lr_find(module, num_training=6, min_lr=1e-4, max_lr=1e-1, early_stop_threshold=None)
        results.append(found.results)
        assert trainer.global_step == 0
        assert_close(parameters(module), before, 0.0)
        if not stock:
            engaged(module, [n] * 6)
            module.reports, module.rates = [], []
            trainer.fit(module)
            engaged(module, windows_of(16, n))
            assert len(module.rates) == len(windows_of(16, n))
    mine, stock = results
    assert mine["lr"] == stock["lr"]
    assert mine["loss"] == pytest.approx(stock["loss"], abs=CLOSE)
    return len(mine["lr"])


@pytest.mark.parametrize(("distributed", "n"), [(True, 2), (False, 1)], ids=["sharded-2", "full-1"])
def test_the_learning_rate_finder_finds_what_stock_finds(distributed, n):
    assert run_on_ranks(2, find_rate, distributed, n) == [6, 6]


class Unscheduled(Tuned):
    """The tuner brings a scheduler, whose entries the checkpoint from before it does not have."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def find_rate_without_scheduler(distributed):
    module = build(Unscheduled)
    before = parameters(module)
    strategy = our_strategy(save_distributed_checkpoint=distributed)
    trainer = trainer_of(strategy, accumulate_grad_batches=2, default_root_dir=tempfile.mkdtemp())
    found = Tuner(trainer).lr_find(module, num_training=4, update_attr=True, early_stop_threshold=None)
    assert_close(parameters(module), before, 0.0)
    module.reports, module.rates = [], []
    trainer.fit(module)
    engaged(module, windows_of(16, 2))
    (group,) = trainer.optimizers[0].param_groups
    assert group["lr"] == module.lr
    return len(found.results["lr"])


@pytest.mark.parametrize("distributed", [True, False], ids=["sharded", "full"])
def test_the_learning_rate_finder_brings_the_only_scheduler(distributed):
    assert run_on_ranks(2, find_rate_without_scheduler, distributed) == [4, 4]


def scale(as_callback):
    module = build(Tuned)
    callbacks = [BatchSizeFinder()] if as_callback else []
    trainer = trainer_of(our_strategy(), callbacks=callbacks)
    trainer.fit(module) if as_callback else Tuner(trainer).scale_batch_size(module)


@pytest.mark.parametrize("as_callback", [True, False])
def test_the_batch_size_finder_is_refused(as_callback):
    for error, message in raises_on_ranks(2, scale, as_callback):
        assert error in ("ValueError", "MisconfigurationException")
        assert "distributed strategies" in message


# -- predictions -------------------------------------------------------------------------------------------------------


class Predicting(Lm):
    def predict_step(self, batch, batch_idx):
        return self.net(batch["tokens"])

    def predict_dataloader(self):
        return DataLoader([sample(i) for i in range(12)], batch_size=BATCH, collate_fn=collate)


class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.batches, self.epochs = [], []

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, batch_idx, dataloader_idx):
        self.batches.append((indices, prediction))

    def write_on_epoch_end(self, trainer, module, predictions, indices):
        self.epochs.append((indices, predictions))


def predicted():
    found = []
    for stock in (False, True):
        writer, module = Writer(), build(Predicting, stock)
        trainer = trainer_of(stock_strategy() if stock else our_strategy())
        trainer.callbacks.append(writer)
        assert trainer.predict(module, return_predictions=False) is None
        found.append(writer)
    mine, stock = found
    assert [i for i, _ in mine.batches] == [i for i, _ in stock.batches]
    assert [i for i, _ in mine.epochs] == [i for i, _ in stock.epochs]
    assert len(mine.batches) == 3
    for (_, a), (_, b) in zip(mine.batches, stock.batches, strict=True):
        assert type(a) is type(b) is torch.Tensor
        torch.testing.assert_close(a, b, rtol=0, atol=CLOSE)
    return [i for i, _ in mine.batches]


def test_predictions_are_written_as_with_stock():
    first, second = run_on_ranks(2, predicted)
    assert sorted(i for rank in (first, second) for batch in rank for i in batch) == list(range(12))
