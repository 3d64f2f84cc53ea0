"""A step that calls fewer blocks ends before earlier ones; what steps leave behind is as in steps one by one."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import MeanMetric

from lightning_chunkmbs import ChunkMBSStrategy
from tests.ranks import run_on_ranks
from tests.state_models import WINDOW, Stepped, assert_engaged, assert_same, build, lockstep, one_by_one, train


class Shallower(Stepped):
    """Each micro-batch of a window calls one block less than the one before, down to none."""

    def __init__(self):
        super().__init__()
        self.index = self.count = self.calls = 0
        self.began, self.entries, self.values = {}, [], []
        self.losses, self.outputs, self.attributes = [], [], []
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.index = batch_idx
        self.count += 1
        self.began["last"] = batch_idx
        self.entries.append(batch_idx)
        hidden = self.net.embed(x)
        for layer in self.net.layers[: WINDOW - 1 - batch_idx % WINDOW]:
            hidden = layer(hidden)
        loss = (self.net.head(self.net.norm(hidden)) - y).square().mean()
        self.values.append(loss.item())
        self.calls += 1
        order.append(batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("index", float(batch_idx), on_step=True)
        self.mean(loss)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        return {"loss": loss, "index": batch_idx}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.losses.append(outputs)
        if (batch_idx + 1) % WINDOW == 0:
            self.attributes.append((self.index, self.count, self.calls, dict(self.began), list(self.entries)))


order: list[int] = []  # of this rank's steps, as they end


class Windows(Shallower):
    """Notes the outputs of windows."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        if (batch_idx + 1) % WINDOW == 0 and isinstance(self.trainer.strategy, ChunkMBSStrategy):
            self.outputs += self.trainer.strategy.window_outputs


def trained(strategy, folder):
    """Train and return the module and the rows of its log, on the first rank."""
    order.clear()
    module = build(Windows)
    trainer = train(module, strategy, logger=CSVLogger(folder), log_every_n_steps=1)
    if not trainer.is_global_zero:
        return module, []
    with Path(trainer.logger.log_dir, "metrics.csv").open() as file:
        return module, [{k: round(float(v), 5) for k, v in row.items() if v} for row in csv.DictReader(file)]


def in_their_order(folder):
    ours, our_rows = trained(lockstep(), folder / "ours")
    assert_engaged(ours)
    assert order == [3, 2, 1, 0, 7, 6, 5, 4]
    # Of two ranks stock FSDP2 does not reduce what only earlier micro-batches used.
    theirs, their_rows = trained("auto" if dist.get_world_size() == 1 else one_by_one(), folder / "theirs")
    assert order == list(range(2 * WINDOW))
    assert_same(ours, theirs)
    assert ours.attributes == theirs.attributes
    assert ours.attributes[-1][:3] == (7, 8, 8)
    assert [o["index"] for o in ours.outputs] == list(range(2 * WINDOW))
    for end in (WINDOW - 1, 2 * WINDOW - 1):
        assert ours.losses[end]["index"] == theirs.losses[end]["index"] == end
        assert ours.losses[end]["loss"].item() == pytest.approx(theirs.losses[end]["loss"].item(), abs=1e-6)
    assert ours.values == pytest.approx(theirs.values, abs=1e-6)
    assert our_rows == their_rows
    return our_rows


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_that_ends_early_counts_in_its_place(world_size, tmp_path):
    rows, *_ = run_on_ranks(world_size, in_their_order, tmp_path)
    assert [row["index"] for row in rows if "index" in row] == [3, 7]
    assert any("mean_step" in row for row in rows)
