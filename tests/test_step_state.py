"""The state of a thread that steps take turns in: what is noted is put back, whatever the order."""

from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_chunkmbs.step_state import ThreadState


class Functions(TorchFunctionMode):
    """Counts the functions of torch that are called."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Counts the operators that are run."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast in fp16": lambda: torch.autocast("cpu", torch.float16),
    "autocast without cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "default dtype": lambda: default_dtype(torch.float64),
    "device": lambda: torch.device("meta"),
    "saved tensors": save_on_cpu,
    "function mode": Functions,
    "dispatch mode": Operators,
}


def probe():
    """What the state does, seen from outside."""
    weight = torch.ones(2, 2, requires_grad=True)
    product = weight.exp() @ torch.ones(2, 2)
    return product.requires_grad, product.dtype, product.device.type, torch.is_autocast_cache_enabled()


@pytest.fixture(autouse=True)
def clean_thread():
    before = ThreadState.now()
    yield
    assert ThreadState.now() == before


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_state_left_and_entered_again_is_the_same(name):
    outside, seen_outside = ThreadState.now(), probe()
    with CONTEXTS[name]():
        inside, seen_inside = ThreadState.now(), probe()
        outside.apply()
        assert (ThreadState.now(), probe()) == (outside, seen_outside)
        inside.apply()
        assert (ThreadState.now(), probe()) == (inside, seen_inside)
    assert (ThreadState.now(), probe()) == (outside, seen_outside)
    assert name == "autocast off" or inside != outside


@pytest.mark.parametrize("first", CONTEXTS)
@pytest.mark.parametrize("second", ["no_grad", "autocast", "device", "saved tensors", "function mode", "dispatch mode"])
def test_two_steps_that_leave_their_contexts_in_the_order_of_entering(first, second):
    outside = ThreadState.now()
    a, b = ExitStack(), ExitStack()
    a.enter_context(CONTEXTS[first]())
    in_a = ThreadState.now()
    outside.apply()
    b.enter_context(CONTEXTS[second]())
    in_b = ThreadState.now()
    for stack, state in ((a, in_a), (b, in_b)):
        state.apply()
        stack.close()
        assert ThreadState.now() == outside


def test_nested_hooks_keep_their_order():
    seen = []

    def hooks(name):
        return saved_tensors_hooks(lambda t: seen.append(f"pack {name}") or t, lambda t: seen.append(name) or t)

    x = torch.ones(2, requires_grad=True)
    with hooks("outer"):
        outside = ThreadState.now()
        with hooks("inner"):
            inside = ThreadState.now()
            outside.apply(inside)
            of_outer = x.exp()
            inside.apply(outside)
            of_inner = x.exp()
        again = x.exp()
    (of_outer + of_inner + again).sum().backward()
    assert seen[:3] == ["pack outer", "pack inner", "pack outer"]
    assert sorted(seen[3:]) == ["inner", "outer", "outer"]


def test_a_mode_that_is_left_for_a_while_sees_nothing_meanwhile():
    for mode in (Functions(), Operators()):
        outside = ThreadState.now()
        with mode:
            inside = ThreadState.now()
            torch.ones(2).exp()
            seen = mode.calls
            outside.apply(inside)
            torch.ones(2).exp()
            assert mode.calls == seen > 0
            inside.apply(outside)
            torch.ones(2).exp()
            assert mode.calls == 2 * seen
