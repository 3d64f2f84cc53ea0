"""Lockstep under the ways in which Lightning's loops can run, start again and end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.callbacks import timer as timer_module
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_chunkmbs import ChunkMBSMixin
from tests.lockstep_models import (
    BATCH,
    BATCHES,
    BLOCKS,
    PAD,
    Lm,
    Run,
    Saving,
    assert_close,
    assert_lockstep,
    assert_rows_alike,
    build,
    collate,
    loader,
    our_strategy,
    sample,
    side_by_side,
    trainer_of,
    windows_of,
)
from tests.models import Loader
from tests.ranks import run_on_ranks


def same(kind, n, windows, options, samples=BATCH):
    ours, _ = side_by_side(kind, n, gradient_clip_val=0.5, **options)
    assert_lockstep(ours, windows, samples=samples)
    return ours.trainer.global_step, ours.trainer.fit_loop.epoch_loop.total_batch_idx + 1


# -- loaders -----------------------------------------------------------------------------------------------------------


class Unequal(Lm):
    """Two loaders; the shorter one starts again."""

    def training_step(self, batch, batch_idx):
        return super().training_step(merged([batch["long"], batch["short"]]), batch_idx)

    def train_dataloader(self):
        return CombinedLoader({"long": loader(), "short": loader(4)}, "max_size_cycle")


class Stream(IterableDataset):
    def __iter__(self):
        samples = range(dist.get_rank(), BATCHES * BATCH * dist.get_world_size(), dist.get_world_size())
        return iter([sample(i) for i in samples])


class Streaming(Lm):
    total_steps = 10

    def train_dataloader(self):
        return DataLoader(Stream(), batch_size=BATCH, collate_fn=collate)


class WithoutIndex(Lm):
    def training_step(self, batch):
        return super().training_step(batch, 3)


@pytest.mark.parametrize(
    ("kind", "n", "windows", "options"),
    [
        (Lm, 16, [7, 7, 7], {"max_epochs": 3}),
        (Streaming, 4, [4, 3, 4, 3], {"max_epochs": 2}),
        (WithoutIndex, 4, [4, 3, 4, 3], {"max_epochs": 2}),
        (Lm, 2, [2, 2, 1] * 2, {"max_epochs": 2, "limit_train_batches": 5}),
        (Lm, 2, [2, 1] * 2, {"max_epochs": 2, "limit_train_batches": 0.5}),
        (Lm, 4, [4, 3] * 2, {"max_epochs": 2, "limit_val_batches": 2, "val_check_interval": 3}),
        (Lm, 3, [3, 3, 1, 3], {"max_epochs": 3, "max_steps": 4}),
        (Lm, 1, [1] * 7 + [4, 3, 2, 2, 2, 1], {"callbacks": [GradientAccumulationScheduler({1: 4, 2: 2})]}),
    ],
    ids=["long", "stream", "indexless", "limit", "fraction", "validation", "steps", "scheduler"],
)
def test_loops_go_as_with_stock(kind, n, windows, options):
    options = {"max_epochs": 3} | options
    for steps, batches in run_on_ranks(2, same, kind, n, windows, options):
        assert (steps, batches) == (len(windows), sum(windows))


def test_loaders_of_unequal_length_are_combined():
    options = {"max_epochs": 2}
    assert run_on_ranks(2, same, Unequal, 4, [4, 3] * 2, options, 2 * BATCH) == [(4, 14)] * 2


# -- ends and changes in mid-window ------------------------------------------------------------------------------------


class Changing(Callback):
    """Another number of micro-batches in each epoch."""

    def on_train_epoch_start(self, trainer, module):
        trainer.accumulate_grad_batches = [2, 4, 1][trainer.current_epoch]


class EndingEpochs(Lm):
    """Ends the first epoch inside a window; what waits there never steps."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.current_epoch == 0 and batch_idx == 6 else None


class Clock(Callback):
    """A minute passes in each micro-batch."""

    def __init__(self):
        self.now = 0.0

    def setup(self, trainer, module, stage):
        self.original = timer_module.time
        timer_module.time = SimpleNamespace(monotonic=lambda: self.now)

    def on_train_batch_start(self, *_args):
        self.now += 60

    def teardown(self, trainer, module, stage):
        timer_module.time = self.original


class Worsening(Lm):
    """Gets worse at the third validation, which is inside a window."""

    def on_validation_epoch_end(self):
        self.validations = getattr(self, "validations", 0) + 1
        self.log("score", float(abs(self.validations - 2)))


def test_n_is_changed_between_epochs():
    windows = windows_of(7, 2) + windows_of(7, 4) + [1] * 7
    options = {"max_epochs": 3, "callbacks": [Changing()]}
    assert run_on_ranks(2, same, Lm, 8, windows, options) == [(13, 21)] * 2


def test_an_epoch_ended_inside_a_window():
    options = {"max_epochs": 2, "dropped": True}
    # Two micro-batches are dropped, and a seventh is drawn and not run.
    assert run_on_ranks(2, same, EndingEpochs, 4, [4, 4, 3], options) == [(3, 14)] * 2


def test_the_time_ends_inside_a_window():
    options = {"max_epochs": 5, "dropped": True, "callbacks": [Clock()], "max_time": {"minutes": 9}}
    assert run_on_ranks(2, same, Lm, 4, [4, 3], options) == [(2, 9)] * 2


def test_early_stopping_inside_a_window():
    stopping = EarlyStopping("score", patience=1, check_on_train_epoch_end=False)
    options = {"max_epochs": 5, "limit_val_batches": 2, "val_check_interval": 3, "dropped": True}
    options["callbacks"] = [stopping]
    assert run_on_ranks(2, same, Worsening, 4, [4, 3], options) == [(2, 10)] * 2


# -- one merged batch instead of lockstep ------------------------------------------------------------------------------


def merged(batches):
    tokens = [row[row != PAD] for batch in batches for row in batch["tokens"]]
    return {
        "tokens": torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=PAD),
        "id": torch.cat([batch["id"] for batch in batches]),
    }


def batches_of_this_rank():
    first = 1000 * (dist.get_rank() + 1)
    return [collate([sample(first + i + j) for j in range(BATCH)]) for i in range(0, BATCHES * BATCH, BATCH)]


class Merging(ChunkMBSMixin, Lm):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, 0)

    def merge_micro_batches(self, batches):
        return merged(batches)

    def train_dataloader(self):
        return Loader(batches_of_this_rank())


class Premerged(Lm):
    """Gets from its loader what :class:`Merging` merges; the window that is not full counts for three quarters."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, 0) * (3 / 4 if batch_idx else 1)

    def train_dataloader(self):
        batches = batches_of_this_rank()
        return Loader([merged(batches[:4]), merged(batches[4:])])


def merging():
    options = {"max_epochs": 2, "gradient_clip_val": 0.5}
    ours = Run(Merging, False, {}, {"accumulate_grad_batches": 4, **options})
    stock = Run(Premerged, True, {}, options)
    assert_close(ours.parameters, stock.parameters)
    assert ours.module.rates == stock.module.rates
    assert ours.module.consumed == stock.module.consumed
    assert ours.trainer.global_step == stock.trainer.global_step == 4
    # The learning rate is written for each batch, of which there are more.
    assert_rows_alike(*([row for row in run.rows if row["epoch"]] for run in (ours, stock)))
    assert len(ours.trainer.strategy.window_outputs) == 1
    for report, window in zip(ours.module.reports, [4, 3, 4, 3], strict=True):
        assert (report.blocks, report.chunks) == (BLOCKS, BLOCKS * BATCH * window)
        assert (report.all_gathers, report.reduce_scatters) == (2 * BLOCKS + 1, BLOCKS + 1)


def test_merged_micro_batches_are_one_big_batch():
    run_on_ranks(2, merging)


# -- starting again ----------------------------------------------------------------------------------------------------


class Resumable(Loader):
    """Goes on where a checkpoint was written."""

    given = 0

    def __iter__(self):
        for i in range(self.given % len(self.data), len(self.data)):
            self.given = i + 1
            yield self.data[i]

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class Resuming(Lm):
    total_steps = 12  # asking for the estimate would set up the loader before the checkpoint is read

    def train_dataloader(self):
        return Resumable(batches_of_this_rank())


def interrupted(number, stock=False, **plan):
    """A run that saved after a micro-batch, and the one that went on from there."""
    options = {"accumulate_grad_batches": 2, "max_epochs": 3, "gradient_clip_val": 0.5}
    whole = Run(Resuming, stock, plan, {**options, "callbacks": [Saving(number)]})
    again = Run(Resuming, stock, plan, {**options, "ckpt_path": whole.saving.folder / str(number)})
    assert again.module.consumed == whole.module.consumed[BATCH * (number + 1) :] != []
    return whole, again


def resume_at_a_windows_end(distributed):
    for number in (10, 13):  # in mid-epoch and at an epoch's end
        whole, again = interrupted(number, save_distributed_checkpoint=distributed)
        assert all(torch.equal(again.parameters[name], p) for name, p in whole.parameters.items())
        assert again.module.rates == whole.module.rates[-len(again.module.rates) :]
        assert again.trainer.global_step == whole.trainer.global_step == 12
        if number == 10:  # with both strategies Lightning does not count again an epoch that had ended
            assert again.counts["loops"] == whole.counts["loops"]
        assert_lockstep(again, [2, 1] * (number == 10) + [2, 2, 2, 1])


def resume_inside_a_window():
    (ours, ours_again), (stock, stock_again) = interrupted(9), interrupted(9, stock=True)
    assert_close(ours.parameters, stock.parameters)
    assert_close(ours_again.parameters, stock_again.parameters)
    assert max((ours_again.parameters[n] - p).abs().max().item() for n, p in ours.parameters.items()) > 1e-4
    for name, value in stock_again.counts.items():
        assert ours_again.counts[name] == value, name
    assert_rows_alike(ours_again.rows, stock_again.rows)


@pytest.mark.parametrize("distributed", [True, False], ids=["folder", "file"])
def test_a_run_resumed_at_a_windows_end_is_the_uninterrupted_one(distributed):
    run_on_ranks(2, resume_at_a_windows_end, distributed)


def test_a_run_resumed_inside_a_window_is_stocks():
    run_on_ranks(2, resume_inside_a_window)


# -- refused -----------------------------------------------------------------------------------------------------------


class Drawing(Lm):
    total_steps = 5

    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class SecondOrder(Lm):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


def refused():
    later = {"callbacks": [GradientAccumulationScheduler({1: 2})], "max_epochs": 2}
    messages = []
    for kind, options in [(Drawing, {"accumulate_grad_batches": 2}), (SecondOrder, later)]:
        module, trainer = build(kind), trainer_of(our_strategy(), **options)
        with pytest.raises(TypeError) as error:
            trainer.fit(module)
        assert module.consumed == []
        messages.append(str(error.value))
    return messages


def test_what_cannot_run_in_windows_is_refused_before_training():
    for drawing, second_order in run_on_ranks(2, refused):
        assert "training_step(dataloader_iter)" in drawing
        assert "LBFGS" in second_order
        for message in (drawing, second_order):
            assert message.count("\n") == 0
            assert "enable_chunk_mbs: false" in message
