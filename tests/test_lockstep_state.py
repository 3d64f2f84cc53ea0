"""Contexts, logs and profilers inside training steps that take turns: as in steps run one by one."""

import contextvars
from collections import deque
from contextlib import nullcontext

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from lightning_chunkmbs import ChunkMBSStrategy
from lightning_chunkmbs.step_state import ThreadState
from tests.ranks import run_on_ranks
from tests.state_models import (
    CHUNKS,
    LAYERS,
    SIZES,
    WINDOW,
    Net,
    Stepped,
    compare,
    in_backward,
    living_greenlets,
    lockstep,
    one_by_one,
    step_number,
    train,
)
from tests.strategy_models import build
from tests.test_step_state import Functions, Operators, default_dtype

bf16 = torch.bfloat16


class Watched(Stepped):
    """Notes what ``look`` sees in every run of a block, with the step it belongs to and whether it is run again."""

    def __init__(self):
        super().__init__()
        self.runs = []
        for i, layer in enumerate(self.net.layers):
            layer.watch = lambda i=i: self.runs.append((i, step_number.get(), in_backward(), self.look()))

    def look(self):
        return None

    def seen_in(self, backward):
        """What was seen in the blocks of each step, in its first or second runs."""
        return {s: {look for _, step, b, look in self.runs if step == s and b == backward} for s in range(2 * WINDOW)}


def check(kind, calls=LAYERS):
    before = ThreadState.now()
    module, _ = compare(kind, calls=calls)
    assert ThreadState.now() == before
    assert living_greenlets() == []
    module.check()


# -- order -------------------------------------------------------------------------------------------------------------


class Ordered(Watched):
    """Notes where the steps go on after each block."""

    def loss(self, x, y, batch_idx):
        out = self.net(x, lambda i, _: self.resumed.append((i, batch_idx)))
        return (out - y).square().mean()

    def __init__(self):
        super().__init__()
        self.resumed = deque()  # of a list each step would see its own

    def check(self):
        turns = [(i, step) for i in range(LAYERS) for step in range(WINDOW)]
        assert list(self.resumed)[: len(turns)] == turns
        first = [i for i, _, again, _ in self.runs if not again][: LAYERS * CHUNKS]
        assert first == sorted(first)
        assert len(set(first)) == LAYERS


# -- grad mode and autocast --------------------------------------------------------------------------------------------


class Autocast(Watched):
    """Autocast around the model in every second step: these run apart from the others."""

    def loss(self, x, y, batch_idx):
        with torch.autocast("cpu", bf16) if batch_idx % 2 else nullcontext():
            out = self.net(x)
        return (out - y).square().mean()

    def look(self):
        return torch.is_autocast_enabled("cpu")

    def check(self):
        expected = {s: {bool(s % 2)} for s in range(2 * WINDOW)}
        assert self.seen_in(backward=False) == self.seen_in(backward=True) == expected


def autocast_in_some_steps():
    # Stock rounds each product to bf16 as a whole, so only the same chunks give the same numbers.
    module, other = compare(Autocast, calls=2 * LAYERS, against=one_by_one)
    assert [r.blocks for r in other.reports] == [WINDOW * LAYERS] * 2
    module.check()
    assert not torch.is_autocast_enabled("cpu")


class SameBlocksAsTeacher(Watched):
    """A pass without gradients through the same blocks before the one with."""

    def loss(self, x, y, batch_idx):
        with torch.no_grad():
            target = self.net(x.flip(1))
        return (self.net(x) - y - 0.1 * target).square().mean()

    def look(self):
        return torch.is_grad_enabled()

    def check(self):
        assert all(looks == {True, False} for looks in self.seen_in(backward=False).values())


class SomeWithoutGrad(SameBlocksAsTeacher):
    """Every second step first calls the blocks without gradients while the others call them with."""

    def loss(self, x, y, batch_idx):
        target = 0
        if batch_idx % 2:
            with torch.no_grad():
                target = self.net(x.flip(1))
        return (self.net(x) - y - 0.1 * target).square().mean()

    def check(self):
        expected = {s: {True, False} if s % 2 else {True} for s in range(2 * WINDOW)}
        assert self.seen_in(backward=False) == expected


class Teacher(Watched):
    """A frozen teacher whose layers are blocks too, under ``no_grad`` or ``inference_mode``."""

    mode = torch.no_grad

    def __init__(self):
        super().__init__()
        self.teacher = Net().requires_grad_(False)

    def loss(self, x, y, batch_idx):
        with self.mode():
            target = self.teacher(x).clone()
        return (self.net(x) - y - 0.1 * target.clone()).square().mean()

    def check(self):
        assert len([run for run in self.runs if not run[2]]) >= LAYERS * len(SIZES)


class InferenceTeacher(Teacher):
    mode = torch.inference_mode


class InferenceOfSameBlocks(Watched):
    """The first pass of all through the blocks is one in inference mode."""

    def loss(self, x, y, batch_idx):
        # With stock FSDP2 nothing can be trained that was first gathered in inference mode.
        ours = isinstance(self.trainer.strategy, ChunkMBSStrategy)
        with torch.inference_mode() if ours else torch.no_grad():
            target = self.net(x.flip(1))
        return (self.net(x) - y - 0.1 * target.clone()).square().mean()

    def look(self):
        return torch.is_inference_mode_enabled()

    def check(self):
        assert all(looks == {True, False} for looks in self.seen_in(backward=False).values())
        assert all(looks == {False} for looks in self.seen_in(backward=True).values())


# -- default device and dtype, contextvars, hooks and modes ------------------------------------------------------------


class Defaults(Watched):
    """Each step its own default device and dtype around the model."""

    def loss(self, x, y, batch_idx):
        dtype = torch.float64 if batch_idx % 4 == 1 else torch.float32
        with torch.device("meta" if batch_idx % 2 else "cpu"), default_dtype(dtype):
            out = self.net(x)
            assert self.look() == ("meta" if batch_idx % 2 else "cpu", dtype)
        return (out - y).square().mean()

    def look(self):
        tensor = torch.empty(1)
        return tensor.device.type, tensor.dtype

    def check(self):
        dtypes = [torch.float64 if s % 4 == 1 else torch.float32 for s in range(2 * WINDOW)]
        expected = {s: {("meta" if s % 2 else "cpu", dtypes[s])} for s in range(2 * WINDOW)}
        assert self.seen_in(backward=False) == expected
        assert self.seen_in(backward=True) == expected


own_value: contextvars.ContextVar[int] = contextvars.ContextVar("own_value", default=0)


class ContextVariables(Watched):
    def loss(self, x, y, batch_idx):
        token = own_value.set(own_value.get() + 100 + batch_idx)
        out = self.net(x)
        own_value.reset(token)
        assert own_value.get() == 0
        return (out - y).square().mean()

    def look(self):
        return own_value.get()

    def check(self):
        expected = {s: {100 + s} for s in range(2 * WINDOW)}
        assert self.seen_in(backward=False) == self.seen_in(backward=True) == expected
        assert own_value.get() == 0


class SavedTensors(Watched):
    """Hooks on saved tensors around the model, of each step its own; in some steps those of torch."""

    def __init__(self):
        super().__init__()
        self.packed = [0] * 2 * WINDOW

    def loss(self, x, y, batch_idx):
        def pack(tensor):
            self.packed[batch_idx] += 1
            return batch_idx, tensor

        def unpack(packed):
            assert packed[0] == batch_idx
            return packed[1]

        with save_on_cpu() if batch_idx % 2 else saved_tensors_hooks(pack, unpack):
            out = self.net(x)
        return (out - y).square().mean()

    def check(self):
        assert [n > 0 for n in self.packed] == [s % 2 == 0 for s in range(2 * WINDOW)]
        assert self.packed[0] == self.packed[6]  # equal sizes, equal work


class Modes(Stepped):
    """A function mode and a dispatch mode around the model in every second step."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def loss(self, x, y, batch_idx):
        with Functions() as functions, Operators() as operators:
            if batch_idx % 2:
                out = self.net(x)
            else:
                y = y + 0
        if batch_idx % 2 == 0:
            out = self.net(x)
        self.calls = {**self.calls, batch_idx: (functions.calls, operators.calls)}
        return (out - y).square().mean()


def modes_see_their_own_step():
    ours, theirs = compare(Modes)
    # In every second step the modes see one addition; around the model they see their own step's work and no other's.
    assert sorted(ours.calls) == list(range(2 * WINDOW))
    assert all(ours.calls[s] == theirs.calls[s] for s in range(0, 2 * WINDOW, 2))
    assert all(min(ours.calls[s]) > 10 for s in range(1, 2 * WINDOW, 2))
    assert ours.calls[5] == ours.calls[7]  # equal sizes, equal work


KINDS = {
    "order": (Ordered, LAYERS),
    "no_grad through the same blocks": (SameBlocksAsTeacher, LAYERS),
    "no_grad in some steps": (SomeWithoutGrad, LAYERS + 2),
    "teacher": (Teacher, LAYERS),
    "teacher in inference mode": (InferenceTeacher, LAYERS),
    "inference mode through the same blocks": (InferenceOfSameBlocks, LAYERS),
    "default device and dtype": (Defaults, LAYERS),
    "contextvars": (ContextVariables, LAYERS),
    "saved tensors": (SavedTensors, LAYERS),
}


@pytest.mark.parametrize("name", KINDS)
def test_steps_keep_their_state(name):
    kind, calls = KINDS[name]
    run_on_ranks(1, check, kind, calls)


def test_autocast_in_some_steps():
    run_on_ranks(1, autocast_in_some_steps)


@pytest.mark.parametrize("name", ["no_grad through the same blocks", "inference mode through the same blocks"])
def test_passes_without_gradients_on_two_ranks(name):
    run_on_ranks(2, check, *KINDS[name])


def test_modes_see_their_own_step():
    run_on_ranks(1, modes_see_their_own_step)


# -- random state ------------------------------------------------------------------------------------------------------


class Forking(Stepped):
    def __init__(self, around_model):
        super().__init__()
        self.around_model = around_model

    def loss(self, x, y, batch_idx):
        before = torch.get_rng_state()
        with torch.random.fork_rng():
            torch.manual_seed(batch_idx)
            noise = torch.randn_like(x) / 10
            out = self.net(x + noise) if self.around_model else None
        assert torch.equal(torch.get_rng_state(), before)
        return ((self.net(x + noise) if out is None else out) - y).square().mean()


def fork_around_model():
    train(build(Forking, True), lockstep())


def fork_around_other_code():
    compare(Forking, False)


def test_a_block_inside_fork_rng_is_refused():
    with pytest.raises(AssertionError, match=r"net\.layers\.0 was called inside torch\.random\.fork_rng"):
        run_on_ranks(1, fork_around_model)


def test_other_code_may_fork_the_random_state():
    run_on_ranks(1, fork_around_other_code)
