"""Lockstep next to Lightning's own accumulation: the same steps, schedules, logs, weights and checkpoints."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.lockstep_models import (
    BATCHES,
    BLOCKS,
    Lm,
    Saving,
    assert_lockstep,
    loader,
    side_by_side,
    windows_of,
)
from tests.ranks import run_on_ranks

EPOCHS = 3


class EverySecondStep(Lm):
    frequency = 2


def train_both(n, kind):
    # Saved inside a window, at a window's end in mid-epoch (but for the longest windows), at the end of the last epoch.
    saving = Saving(n + n // 2 - 1, BATCHES + n - 1, 3 * BATCHES - 1)
    ours, _ = side_by_side(kind, n, max_epochs=EPOCHS, gradient_clip_val=0.5, limit_val_batches=2, callbacks=[saving])
    assert_lockstep(ours, windows_of(BATCHES, n) * EPOCHS)
    assert len(ours.saving.contents()) == (3 if dist.get_rank() == 0 else 0)
    return ours.module.consumed, ours.module.rates, ours.trainer.global_step, [len(r) for r in ours.rows]


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("kind", [Lm, EverySecondStep], ids=["every step", "every second step"])
def test_training_is_stocks(n, kind):
    results = run_on_ranks(2, train_both, n, kind)
    consumed = sorted(sample for rank in results for sample in rank[0])
    assert consumed == [(epoch, i) for epoch in range(EPOCHS) for i in range(2 * 2 * BATCHES)]
    for _, rates, global_step, _ in results:
        assert global_step == len(rates) == EPOCHS * -(-BATCHES // n)
        # Lightning counts micro-batches for `frequency`; after the very last one no step is left to see the new rate.
        ends = [end for end in range(1, BATCHES + 1) if end % n == 0 or end == BATCHES]
        changes = EPOCHS * sum(end % kind.frequency == 0 for end in ends) - (BATCHES % kind.frequency == 0)
        assert len(set(rates)) == 1 + changes


def save_before_the_first_step():
    ours, _ = side_by_side(Lm, 4, max_epochs=2, callbacks=[Saving(1)])
    return [list(c["optimizer_states"][0]["state"]) for c in ours.saving.contents()]


def test_a_checkpoint_inside_the_first_window_is_stocks_and_changes_nothing():
    assert run_on_ranks(2, save_before_the_first_step) == [[[]], []]


class Long(Lm):
    def train_dataloader(self):
        return loader(11)


def bounded_windows():
    for bound in (4, 1):
        ours, _ = side_by_side(Long, 10, {"max_lockstep": bound}, max_epochs=2, gradient_clip_val=0.5)
        assert_lockstep(ours, windows_of(11, 10) * 2, max_lockstep=bound)
    return ours.trainer.global_step


def test_a_window_longer_than_max_lockstep_takes_several_passes():
    assert run_on_ranks(2, bounded_windows) == [4, 4]


def without_chunks():
    ours, _ = side_by_side(Lm, 4, {"enable_chunk_mbs": False}, max_epochs=2, gradient_clip_val=0.5)
    return [report.blocks for report in ours.module.reports]


def test_without_chunking_accumulation_is_lightnings():
    for blocks in run_on_ranks(2, without_chunks):
        assert blocks == [4 * BLOCKS, 3 * BLOCKS] * 2


class Manual(Lm):
    """Accumulates two batches by hand."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            self.rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    def on_before_optimizer_step(self, optimizer):
        pass


def manual_steps():
    ours, _ = side_by_side(Manual, 1, max_epochs=2)
    return [report.blocks for report in ours.module.reports], ours.trainer.global_step


def test_manual_optimization_has_no_windows():
    for blocks, steps in run_on_ranks(2, manual_steps):
        assert steps == 6
        # One batch is left over in each epoch and counts with the next step.
        assert blocks == [2 * BLOCKS] * 3 + [3 * BLOCKS] + [2 * BLOCKS] * 2
