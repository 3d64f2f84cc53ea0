"""What training steps that take turns log and profile: as steps run one by one do."""

import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from torchmetrics.classification import BinaryAccuracy

from tests.ranks import run_on_ranks
from tests.state_models import SIZES, WINDOW, Stepped, assert_engaged, assert_same, lockstep, oracle, train
from tests.strategy_models import build

# -- profilers ---------------------------------------------------------------------------------------------------------


class Profiled(Stepped):
    def loss(self, x, y, batch_idx):
        with self.trainer.profiler.profile("model"):
            out = self.net(x)
        with self.trainer.profiler.profile("loss"):
            return (out - y).square().mean()


def profile_simply():
    module, profiler = build(Profiled), SimpleProfiler()
    train(module, lockstep(), profiler=profiler)
    assert_engaged(module)
    assert profiler.current_actions == {}
    for action in ("model", "loss"):
        assert {f"{action} [micro-batch {i}]" for i in range(WINDOW)} <= set(profiler.recorded_durations)
    assert [len(profiler.recorded_durations[f"model [micro-batch {i}]"]) for i in range(WINDOW)] == [2] * WINDOW


def profile_with_torch(tmp_path):
    module, profiler = build(Profiled), PyTorchProfiler(dirpath=tmp_path, filename="p", record_module_names=False)
    train(module, lockstep(), profiler=profiler, sizes=SIZES[:WINDOW])
    assert_engaged(module, windows=1)
    text = "".join(path.read_text() for path in tmp_path.glob("*.txt"))
    assert all(f"model [micro-batch {i}]" in text for i in range(WINDOW))


def test_actions_of_steps_are_profiled_apart():
    run_on_ranks(1, profile_simply)


def test_actions_of_steps_are_profiled_by_torch(tmp_path):
    run_on_ranks(1, profile_with_torch, tmp_path)


# -- logs --------------------------------------------------------------------------------------------------------------


class Logging(Stepped):
    def __init__(self):
        super().__init__()
        self.accuracy = BinaryAccuracy()

    def loss(self, x, y, batch_idx):
        self.log("before", x.mean(), on_step=True, on_epoch=True)
        out = self.net(x)
        loss = (out - y).square().mean()
        self.log("after", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log_dict({"most": out.max(), "size": float(len(x))}, on_epoch=True, on_step=False, reduce_fx="max")
        self.accuracy(out.sigmoid(), y > 0.5)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss


def logged(kind, strategy, folder):
    """Train and return the module, the rows of its log (on the first rank) and the last value of each metric."""
    module = build(kind)
    trainer = train(module, strategy, max_epochs=2, logger=CSVLogger(folder), log_every_n_steps=1)
    rows = []
    if trainer.is_global_zero:
        with Path(trainer.logger.log_dir, "metrics.csv").open() as file:
            rows = [{k: round(float(v), 5) for k, v in row.items() if v} for row in csv.DictReader(file)]
    return module, rows, {k: round(v.item(), 5) for k, v in trainer.callback_metrics.items()}


def logs_equal_stock(folder):
    ours, our_rows, our_metrics = logged(Logging, lockstep(), folder / "ours")
    theirs, their_rows, their_metrics = logged(Logging, oracle(), folder / "theirs")
    assert_engaged(ours, windows=4)
    assert_same(ours, theirs)
    assert our_metrics == their_metrics
    assert our_rows == their_rows
    return our_metrics, len([row for row in our_rows if "before_step" in row])


@pytest.mark.parametrize("world_size", [1, 2])
def test_logged_values_equal_stock(world_size, tmp_path):
    [(metrics, rows), *_] = run_on_ranks(world_size, logs_equal_stock, tmp_path)
    assert {"after_epoch", "accuracy_epoch", "accuracy_step", "size"} <= set(metrics)
    assert metrics["size"] == max(SIZES)
    assert rows == 4
