"""Hooks, overrides, batches and outputs in lockstep, next to Lightning's own accumulation."""

from __future__ import annotations

import pytest
from lightning.pytorch import Callback
from torch.distributed.tensor import DTensor

from lightning_chunkmbs import ChunkMBSStrategy
from tests.lockstep_models import (
    BATCHES,
    BLOCKS,
    Lm,
    Run,
    assert_alike,
    assert_lockstep,
    collate,
    loader,
    side_by_side,
    windows_of,
)
from tests.models import full
from tests.ranks import raises_on_ranks, run_on_ranks

N = 4
WINDOWS = windows_of(BATCHES, N) * 2


def gradients(module):
    return {name: full(p.grad).clone() for name, p in module.named_parameters() if p.grad is not None}


# -- order and number of hooks -----------------------------------------------------------------------------------------

AROUND_BACKWARD = ("training_step", "on_before_backward", "backward", "block", "on_after_backward")


class Hooked(Lm):
    """Notes each hook, with what it was given or saw."""

    def __init__(self):
        super().__init__()
        self.events = []
        self.seen = []  # gradients at on_before_zero_grad, at on_before_optimizer_step and after clipping
        for layer in self.net.layers:
            layer.down.register_full_backward_pre_hook(lambda *_: self.note("block"))

    def note(self, name, value=None):
        self.events.append((name, value))

    def names(self, *left_out):
        return [name for name, _ in self.events if name not in left_out]

    def values(self, name):
        return [value for event, value in self.events if event == name]

    def on_train_batch_start(self, batch, batch_idx):
        self.note("on_train_batch_start", batch_idx)

    def training_step(self, batch, batch_idx):
        self.note("training_step", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer):
        self.note("on_before_zero_grad")
        self.seen.append(gradients(self))

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.note("optimizer_zero_grad", batch_idx)
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def on_before_backward(self, loss):
        self.note("on_before_backward", loss.detach().clone())

    def backward(self, loss, *args, **kwargs):
        self.note("backward", loss.detach().clone())
        super().backward(2 * loss, *args, **kwargs)

    def on_after_backward(self):
        self.note("on_after_backward", gradients(self))
        assert all(isinstance(p.grad, DTensor) for p in self.parameters())

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        self.note("optimizer_step", batch_idx)
        loss = []
        super().optimizer_step(epoch, batch_idx, optimizer, lambda: loss.append(optimizer_closure()))
        self.note("optimizer_step ends", loss[0])

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        self.note("on_before_optimizer_step")
        self.seen.append(gradients(self))

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.note("configure_gradient_clipping", gradient_clip_val)
        for p in self.parameters():
            p.grad.mul_(2)
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.seen.append(gradients(self))

    def lr_scheduler_step(self, scheduler, metric):
        self.note("lr_scheduler_step")
        super().lr_scheduler_step(scheduler, metric)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.note("on_train_batch_end", batch_idx)


class HookedCallback(Callback):
    """The same hooks of callbacks, which come before the module's."""

    def on_before_backward(self, trainer, module, loss):
        module.note("callback on_before_backward", loss.detach().clone())

    def on_after_backward(self, trainer, module):
        module.note("callback on_after_backward")


def hooks():
    ours, stock = side_by_side(Hooked, N, max_epochs=2, gradient_clip_val=0.5, callbacks=[HookedCallback()])
    assert_lockstep(ours, WINDOWS)
    mine, theirs = ours.module, stock.module
    inner = (*AROUND_BACKWARD, "callback on_before_backward", "callback on_after_backward")
    assert mine.names(*inner) == theirs.names(*inner)
    for name in {*mine.names(), *theirs.names()} - {"block", "on_after_backward"}:
        assert_alike(mine.values(name), theirs.values(name), name)
    for number, (seen, expected) in enumerate(zip(mine.seen, theirs.seen, strict=True)):
        assert len(seen) == len(list(mine.parameters())) if number else not seen
        # The model's own group hides its gradients from stock's on_before_zero_grad, in which it is gathered.
        assert_alike({name: seen[name] for name in expected}, expected, f"gradients {number}")
    check_after_backward(mine, theirs)
    return mine.names()


def check_after_backward(mine, theirs):
    """As many calls as with stock; the last of a window sees what stock's last sees."""
    ours, stock = mine.values("on_after_backward"), theirs.values("on_after_backward")
    assert len(ours) == len(stock) == 2 * BATCHES
    first = 0
    for window in WINDOWS:
        last = first + window - 1
        assert len(stock[last]) == len(list(mine.parameters()))
        assert_alike([ours[i] for i in range(first, last + 1)], [stock[last]] * window)
        first = last + 1


def test_hooks_come_in_stocks_order_and_see_what_stocks_see():
    for names in run_on_ranks(2, hooks):
        assert names.count("on_before_backward") == names.count("backward") == 2 * BATCHES
        # A window's steps end before the blocks' backward, and that before on_after_backward.
        first = names[: names.index("on_after_backward")]
        assert [n for n in first if n in AROUND_BACKWARD and n != "block"] == (
            # What a step appends to a list of the module is in it when the step has ended, as if it had run alone.
            ["training_step", "on_before_backward", "backward"] * N
        )
        assert first[-1] == "callback on_after_backward"
        assert first[-2] == "block"
        assert names[names.index("on_after_backward") :][: 2 * N - 1 : 2] == ["on_after_backward"] * N


# -- outputs -----------------------------------------------------------------------------------------------------------


class Extra(Lm):
    """Returns a dict with more than the loss."""

    def __init__(self):
        super().__init__()
        self.outputs = []
        self.windows = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "index": batch_idx, "id": batch["id"], "double": 2 * loss.detach(), "name": "step"}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.outputs.append(outputs)
        if isinstance(self.trainer.strategy, ChunkMBSStrategy):
            self.windows.append(list(self.trainer.strategy.window_outputs))


class Plain(Extra):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"]


def outputs(kind, max_lockstep):
    ours, stock = side_by_side(kind, N, {"max_lockstep": max_lockstep}, max_epochs=2)
    assert_lockstep(ours, WINDOWS, max_lockstep)
    module, expected, first = ours.module, stock.module.outputs, 0
    for window in WINDOWS:
        last = first + window - 1
        assert_alike(module.windows[last], expected[first : last + 1])
        assert_alike(module.outputs[last], expected[last])
        if max_lockstep is None:
            assert all(list(o) == ["loss"] and o["loss"].isnan() for o in module.outputs[first:last])
        first = last + 1


@pytest.mark.parametrize("max_lockstep", [None, 2])
@pytest.mark.parametrize("kind", [Plain, Extra], ids=["loss", "dict"])
def test_outputs_are_complete_at_the_windows_end(kind, max_lockstep):
    run_on_ranks(2, outputs, kind, max_lockstep)


class Nothing(Extra):
    """Skips some steps by returning None."""

    skipped = ()

    def __init__(self):
        super().__init__()
        self.after_backward = 0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        return None if batch_idx in self.skipped else loss

    def on_after_backward(self):
        self.after_backward += 1


class SkipsFirst(Nothing):
    skipped = (0, 4)


class SkipsMiddle(Nothing):
    skipped = (1, 2, 5)


class SkipsLast(Nothing):
    skipped = (3, 6)


class SkipsWindow(Nothing):
    skipped = (0, 1, 2, 3)


class SkipsSingle(Nothing):
    skipped = (6,)


def skipping(kind, n):
    ours, stock = side_by_side(kind, n, max_epochs=2, gradient_clip_val=0.5, use_distributed_sampler=False)
    assert [r.blocks for r in ours.module.reports] == [BLOCKS] * len(windows_of(BATCHES, n)) * 2
    assert ours.module.after_backward == stock.module.after_backward == 2 * (BATCHES - len(kind.skipped))
    first = 0
    for window in windows_of(BATCHES, n) * 2:
        assert_alike(ours.module.windows[first + window - 1], stock.module.outputs[first : first + window])
        first += window


@pytest.mark.parametrize(
    ("kind", "n"), [(SkipsFirst, 4), (SkipsMiddle, 4), (SkipsLast, 4), (SkipsWindow, 4), (SkipsSingle, 2)]
)
def test_one_process_may_skip_steps(kind, n):
    run_on_ranks(1, skipping, kind, n)


def skip_on_two_ranks(kind, n):
    Run(kind, False, {}, {"accumulate_grad_batches": n})


@pytest.mark.parametrize(("kind", "n"), [(SkipsFirst, 4), (SkipsLast, 4), (SkipsSingle, 2)])
def test_several_processes_may_not(kind, n):
    for error, message in raises_on_ranks(2, skip_on_two_ranks, kind, n):
        assert error == "RuntimeError"
        assert "None" in message
        assert "distributed training" in message or "several processes" in message


# -- batches -----------------------------------------------------------------------------------------------------------


def collate_mixed(samples):
    """Tensors, strings, numbers, None and lists of unequal lengths; one sample or two."""
    batch = collate(samples[: 1 + samples[0]["id"] % 2])
    ids = [int(i) for i in batch["id"]]
    return {
        **batch,
        "names": [f"sample {i}" for i in ids],
        "number": ids[0] % 5,
        "nothing": None,
        "lists": [list(range(i % 4)) for i in ids],
        "nested": {"pair": (batch["id"].float(), "text")},
    }


class Mixed(Lm):
    """Its loss depends on every part of its batch, also after the model was called."""

    def train_dataloader(self):
        return loader(collate_fn=collate_mixed)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        factor = batch["number"] + sum(len(part) for part in batch["lists"]) + len(batch["names"][0])
        assert batch["nothing"] is None
        assert batch["names"] == [f"sample {int(i)}" for i in batch["id"]]
        self.log("factor", float(factor), on_step=True, on_epoch=True)
        return loss * (1 + 0.1 * factor + 0.01 * batch["nested"]["pair"][0].mean())


class Transferring(Mixed):
    """Changes its batches on the way to the device."""

    def __init__(self):
        super().__init__()
        self.hooks = []

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.hooks.append("before")
        return {**batch, "lists": [[*part, 0] for part in batch["lists"]]}

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.hooks.append("transfer")
        batch = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return {**batch, "number": batch["number"] + 1}

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.hooks.append("after")
        return {**batch, "tokens": batch["tokens"].flip(1)}


def mixed_batches():
    for kind in (Mixed, Transferring):
        ours, stock = side_by_side(kind, N, max_epochs=2, gradient_clip_val=0.5)
        assert_lockstep(ours, WINDOWS, samples=None)
    assert ours.module.hooks == stock.module.hooks == ["before", "transfer", "after"] * 2 * BATCHES


def test_batches_of_any_kind_reach_their_steps():
    run_on_ranks(2, mixed_batches)
