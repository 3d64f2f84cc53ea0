"""What a step assigns on modules is its own while steps take turns; what it does not assign goes from step to step."""

import re

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_chunkmbs.step_attributes import StepAttributes
from tests.ranks import run_on_ranks
from tests.state_models import LAYERS, WINDOW, Stepped, assert_engaged, assert_same, compare, lockstep, oracle, train
from tests.strategy_models import all_sharded, build, live_bytes


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = None
        self.count = 0


def turns(attributes, *actions):
    """Let steps run one after the other: (step, function) each."""
    for step, action in actions:
        attributes.enter(step)
        action()
        attributes.leave(step)


# -- by itself ---------------------------------------------------------------------------------------------------------


def test_each_step_finds_what_it_assigned():
    holder, found = Holder(), []
    set_to = [lambda i=i: setattr(holder, "value", torch.full((1,), i)) for i in range(3)]
    look = [lambda: found.append(holder.value.item())] * 3
    turns(StepAttributes({"m": holder}), *enumerate(set_to), *enumerate(look))
    assert found == [0, 1, 2]


def test_what_a_step_did_not_assign_is_the_latest():
    holder = Holder()

    def increment():
        holder.count += 1

    turns(StepAttributes({"m": holder}), *((i, increment) for i in range(4)), *((i, lambda: None) for i in range(4)))
    assert holder.count == 4


def test_an_attribute_deleted_in_a_step_is_gone_in_that_step_only():
    holder, found = Holder(), []
    look = [lambda: found.append(hasattr(holder, "value"))] * 2
    change = [lambda: delattr(holder, "value"), lambda: setattr(holder, "value", 2)]
    turns(StepAttributes({"m": holder}), *enumerate(change), *enumerate(look))
    assert found == [False, True]
    assert holder.value == 2


def test_an_attribute_made_and_deleted_again_is_nowhere():
    holder = Holder()
    attributes = StepAttributes({"m": holder})
    make = [lambda i=i: setattr(holder, "new", i) for i in range(2)]
    turns(attributes, *enumerate(make), *((i, lambda: delattr(holder, "new")) for i in range(2)))
    assert not hasattr(holder, "new")


def test_parameters_buffers_and_modules_are_not_attributes():
    holder, later = Holder(), nn.Linear(1, 1)
    holder.register_buffer("buffer", torch.zeros(1))
    new = torch.ones(1)
    turns(
        StepAttributes({"m": holder}),
        (0, lambda: setattr(holder, "buffer", new)),
        (0, lambda: setattr(holder, "child", later)),
        (1, lambda: None),
    )
    assert holder.buffer is new
    assert holder.child is later


def test_only_named_attributes_of_a_module_are_kept():
    holder, found = Holder(), []
    both = [lambda i=i: (setattr(holder, "value", 300 + i), setattr(holder, "count", 300 + i)) for i in range(2)]
    look = [lambda: found.append((holder.value, holder.count))] * 2
    turns(StepAttributes({"m": holder}, only={"m": ["value"]}), *enumerate(both), *enumerate(look))
    assert found == [(300, 301), (301, 301)]


def test_values_that_differ_outside_are_reported_by_name():
    inner, alike = Holder(), Holder()
    attributes = StepAttributes({}, outside={"a.inner": inner, "a.alike": alike})
    differ = [lambda i=i: setattr(inner, "value", torch.full((1,), i)) for i in range(2)]
    same = [lambda: setattr(alike, "value", 1000.5)] * 2
    turns(attributes, *enumerate(differ), *enumerate(same))
    assert attributes.mixed() == ["a.inner.value"]


# -- in a fit ----------------------------------------------------------------------------------------------------------


class Target(Stepped):
    """Keeps the batch on itself before the model and uses it after."""

    def loss(self, x, y, batch_idx):
        self.target = y
        self.scale = 1 + batch_idx % 2
        return self.scale * (self.net(x) - self.target).square().mean()


class Flag(Stepped):
    """Its attributes take few values, so that a step often assigns what is there already."""

    def __init__(self):
        super().__init__()
        self.double = True
        self.length = 0

    def loss(self, x, y, batch_idx):
        self.double = batch_idx % 2 == 0
        self.length = 1 + batch_idx % 2 + batch_idx % 4 // 3
        loss = (self.net(x)[:, : self.length] - y[:, : self.length]).square().mean()
        return 2 * loss if self.double else loss


class OnChild(Stepped):
    """Keeps something on a direct child, by the child and from outside."""

    def loss(self, x, y, batch_idx):
        self.net.mask = y > 0.5
        out = self.net(x)
        return (out * self.net.mask - y).square().mean()


class Deleted(Stepped):
    def loss(self, x, y, batch_idx):
        self.kept = y
        out = self.net(x)
        loss = (out - self.kept).square().mean()
        del self.kept
        assert not hasattr(self, "kept")
        return loss

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        assert not hasattr(self, "kept")


class Counting(Stepped):
    """Counts before the blocks, after them, or both; keeps lists and a metric."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.n = 0
        self.entries = []
        self.weights = MeanMetric()

    def loss(self, x, y, batch_idx):
        self.own = [batch_idx]
        if "before" in self.where:
            self.n += 1
            self.weights.update(batch_idx)
        out = self.net(x)
        if "after" in self.where:
            self.n += 1
            self.weights.update(10 * batch_idx)
        self.own.append(batch_idx)
        self.entries.append(self.own)
        return (out - y).square().mean()


def counts(where):
    ours, theirs = compare(Counting, where)
    assert ours.entries == theirs.entries == [[i, i] for i in range(2 * WINDOW)]
    torch.testing.assert_close(ours.weights.compute(), theirs.weights.compute())
    return ours.n, theirs.n


class Deep(Stepped):
    """Keeps something on a module below its direct children, outside blocks."""

    def loss(self, x, y, batch_idx):
        self.net.head.target = y
        return (self.net(x) - self.net.head.target).square().mean()


def deep_assignment_is_refused():
    module = build(Deep)
    with pytest.raises(RuntimeError) as caught:
        train(module, lockstep(), sizes=[3] * WINDOW)
    message = str(caught.value)
    del caught
    assert all_sharded(module)
    assert live_bytes(module.trainer) == 0
    return message


def deep_assignment_is_cured():
    compare(Deep, plan={"lockstep_attributes": ["net.head.target"]})
    # One at a time: every micro-batch is a pass of its own.
    compare(Deep, calls=WINDOW * LAYERS, plan={"max_lockstep": 1})


class DeepButAlike(Stepped):
    """What every step assigns is the same, so it cannot be mixed up."""

    def loss(self, x, y, batch_idx):
        self.net.head.mode = "train"
        self.net.embed.width = 4
        return super().loss(x, y, batch_idx)


class DeepLater(Stepped):
    """Assigns inside a block, where steps do not take turns."""

    def loss(self, x, y, batch_idx):
        for layer in self.net.layers:
            layer.watch = lambda layer=layer: setattr(layer.up, "seen", object())
        return super().loss(x, y, batch_idx)


def wrong_name(name):
    train(build(Deep), lockstep(lockstep_attributes=[name]))


def runs(kind):
    ours, theirs = build(kind), build(kind)
    train(ours, lockstep())
    train(theirs, oracle())
    assert_engaged(ours)
    assert_same(ours, theirs)


@pytest.mark.parametrize("kind", [Target, Flag, OnChild, Deleted, DeepButAlike, DeepLater])
def test_attributes_of_a_step_are_its_own(kind):
    run_on_ranks(1, runs, kind)


def test_attributes_of_a_step_are_its_own_on_two_ranks():
    run_on_ranks(2, runs, Target)


@pytest.mark.parametrize("where", ["before", "after"])
def test_counters_end_as_in_steps_one_by_one(where):
    [(ours, theirs)] = run_on_ranks(1, counts, where)
    assert ours == theirs > 0


def test_an_assignment_deep_inside_is_refused_by_name():
    [message] = run_on_ranks(1, deep_assignment_is_refused)
    assert "Several steps assigned others, each its own value: net.head.target." in message
    assert re.search(r"lockstep_attributes: \['net.head.target'\].*max_lockstep: 1", message)


def test_an_assignment_deep_inside_can_be_declared_or_run_alone():
    run_on_ranks(1, deep_assignment_is_cured)


@pytest.mark.parametrize("name", ["target", "net.nothing.target", ""])
def test_a_declared_attribute_of_no_module_is_refused(name):
    with pytest.raises(AssertionError, match=f"lockstep_attributes names an attribute of .*; '{name}' names none"):
        run_on_ranks(1, wrong_name, name)
