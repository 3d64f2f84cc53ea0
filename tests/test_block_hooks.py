"""What a block sees of its surroundings: hooks once per micro-batch, and the same state again in recomputation."""

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from lightning_chunkmbs.block import run_block
from lightning_chunkmbs.chunk_runs import BlockCall
from tests.chunking import (
    again,
    backward,
    chunk_layers,
    count_calls,
    gradients,
    leaf,
    make_twins,
    max_error,
    tiny_qwen3,
)

SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


class Layer(nn.Module):
    """A layer whose arguments all act on its output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)

    def forward(self, x: Tensor, shift: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        hidden = torch.tanh(self.up(x) * scale)
        return self.down(hidden if shift is None else hidden + shift)


# -- forward hooks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("always_call", [False, True])
def test_forward_hooks_see_the_micro_batch_once(always_call: bool) -> None:
    twins, seen = make_twins(Layer(), chunk_mbs=2), []
    hook = lambda _module, args, kwargs, output: seen.append((args, kwargs, output))  # noqa: E731
    twins.block.register_forward_hook(hook, with_kwargs=True, always_call=always_call)
    inner, x, shift = count_calls(twins.block.up), leaf(5, 4, 6), leaf(12, seed=1)
    output = twins.block(x, shift=shift, scale=2.0)
    assert inner() == 3
    backward(output)
    assert inner() == 6
    ((args, kwargs, seen_output),) = seen
    assert args[0] is x
    assert kwargs == {"shift": shift, "scale": 2.0}
    assert seen_output is output


def test_forward_hooks_without_keywords_see_positional_arguments() -> None:
    twins, seen = make_twins(Layer()), []
    twins.block.register_forward_hook(lambda _module, args, output: seen.append((args, output)))
    twins.block.register_forward_pre_hook(lambda _module, args: seen.append(args))
    x, shift = leaf(5, 4, 6), leaf(12, seed=1)
    output = twins.block(x, shift, scale=2.0)
    assert seen[0][0] is seen[1][0][0] is x
    assert seen[0][1] is seen[1][0][1] is shift
    assert seen[1][1] is output
    assert twins.counter.take().chunks == 5


def test_a_forward_hook_can_replace_the_output() -> None:
    twins, x = make_twins(Layer(), chunk_mbs=2), leaf(5, 4, 6)
    (other,) = again(x)
    for module in (twins.block, twins.plain):
        module.register_forward_hook(lambda _module, _args, output: {"hidden": output * 3})
    backward(twins.block(x)["hidden"])
    backward(twins.plain(other)["hidden"])
    assert twins.counter.take().chunks == 3
    assert max_error([x.grad, *gradients(twins.block)], [other.grad, *gradients(twins.plain)]) < 1e-6


def test_a_hook_that_is_always_called_runs_after_an_error() -> None:
    twins, seen = make_twins(Layer()), []
    twins.block.register_forward_hook(lambda *_: seen.append(1), always_call=True)
    with pytest.raises(RuntimeError, match="shape"):
        twins.block(leaf(5, 4, 7))
    assert seen == [1]


# -- forward pre-hooks -----------------------------------------------------------------------------------------------


def _add_shift(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args, kwargs | {"shift": args[0].sum(-1, keepdim=True).tanh(), "scale": 0.5}


def _replace_input(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (args[0] * 2, torch.linspace(0, 1, 12)), kwargs


@pytest.mark.parametrize("hook", [_add_shift, _replace_input])
@pytest.mark.parametrize("chunk_mbs", [1, 2, 8])
def test_what_a_pre_hook_adds_acts_in_recomputation_too(hook: Callable[..., Any], chunk_mbs: int) -> None:
    twins = make_twins(Layer(), chunk_mbs=chunk_mbs, kwarg_names=("shift",))
    x, calls = leaf(5, 4, 6), []
    (other,) = again(x)
    for module in (twins.block, twins.plain):
        module.register_forward_pre_hook(hook, with_kwargs=True)
    twins.block.register_forward_pre_hook(lambda _module, args: calls.append(len(args[0])))
    ours, theirs = twins.block(x), twins.plain(other)
    backward(ours)
    backward(theirs)
    assert calls == [5]
    assert twins.counter.take().chunks == -(-5 // chunk_mbs)
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert max_error([x.grad, *gradients(twins.block)], [other.grad, *gradients(twins.plain)]) < 1e-6


def test_a_pre_hook_without_keywords_can_replace_the_input() -> None:
    twins, x = make_twins(Layer()), leaf(3, 4, 6)
    for module in (twins.block, twins.plain):
        module.register_forward_pre_hook(lambda _module, args: args[0] * 2)
    assert torch.allclose(twins.block(x), twins.plain(x), atol=1e-6)
    assert twins.counter.take().chunks == 3


# -- backward hooks --------------------------------------------------------------------------------------------------


def test_backward_hooks_see_the_micro_batch_once() -> None:
    twins, seen, x = make_twins(Layer(), chunk_mbs=2), {"ours": [], "theirs": []}, leaf(5, 4, 6)
    (other,) = again(x)
    for name, module in {"ours": twins.block, "theirs": twins.plain}.items():
        module.register_full_backward_hook(lambda _m, grads, outs, name=name: seen[name].append((grads[0], outs[0])))
        module.register_full_backward_pre_hook(lambda _m, outs, name=name: seen[name].append((outs[0],)))
    backward(twins.block(x))
    backward(twins.plain(other))
    assert twins.counter.take().chunks == 3
    assert [len(grads) for grads in seen["ours"]] == [1, 2]
    for ours, theirs in zip(seen["ours"], seen["theirs"], strict=True):
        assert max_error(list(ours), list(theirs)) < 1e-6


def test_backward_hooks_can_replace_gradients() -> None:
    twins, x = make_twins(Layer(), chunk_mbs=2), leaf(5, 4, 6)
    (other,) = again(x)
    for module in (twins.block, twins.plain):
        module.register_full_backward_hook(lambda _m, grads, _outs: (grads[0] * 5,))
        module.register_full_backward_pre_hook(lambda _m, outs: (outs[0] * 0.5,))
    backward(twins.block(x))
    backward(twins.plain(other))
    assert twins.counter.take().chunks == 3
    assert max_error([x.grad, *gradients(twins.block)], [other.grad, *gradients(twins.plain)]) < 1e-6


# -- hooks on all modules --------------------------------------------------------------------------------------------


def test_global_hooks_see_the_block_once() -> None:
    twins, seen, x = make_twins(Layer(), chunk_mbs=2), [], leaf(5, 4, 6)
    handles = [
        global_hooks.register_module_forward_pre_hook(lambda m, args: seen.append((m, "pre", len(args[0])))),
        global_hooks.register_module_forward_hook(lambda m, _args, out: seen.append((m, "post", len(out)))),
        global_hooks.register_module_full_backward_hook(lambda m, _in, outs: seen.append((m, "back", len(outs[0])))),
    ]
    try:
        backward(twins.block(x))
    finally:
        for handle in handles:
            handle.remove()
    backward(twins.plain(x.detach()))
    assert twins.counter.take().chunks == 3
    assert [event for event in seen if event[0] is twins.block] == [
        (twins.block, "pre", 5),
        (twins.block, "post", 5),
        (twins.block, "back", 5),
    ]
    assert max_error(gradients(twins.block), gradients(twins.plain)) < 1e-6


# -- contextvars -----------------------------------------------------------------------------------------------------


class Scaled(Layer):
    """A layer that reads a context variable."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[float] = []

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.read.append(SCALE.get())
        return super().forward(x * SCALE.get())


def _in_thread(fn: Callable[[], Any]) -> None:
    thread = threading.Thread(target=fn)
    thread.start()
    thread.join()


@pytest.mark.parametrize("run_backward", [lambda fn: fn(), _in_thread])
def test_recomputation_sees_the_callers_context(run_backward: Callable[..., None]) -> None:
    twins, x = make_twins(Scaled(), chunk_mbs=2), leaf(5, 4, 6)
    token = SCALE.set(3.0)
    try:
        ours, theirs = twins.block(x), twins.plain(x)
    finally:
        SCALE.reset(token)
    run_backward(lambda: backward(ours))
    backward(theirs)
    assert twins.block.read == [3.0] * 6
    assert SCALE.get() == 1.0
    assert max_error(gradients(twins.block), gradients(twins.plain)) < 1e-6


def test_recomputation_starts_from_the_context_in_which_its_chunk_started() -> None:
    twins = make_twins(Scaled(), chunk_mbs=2)
    twins.block.up.register_forward_hook(lambda *_: SCALE.set(SCALE.get() * 2) and None)
    loss = contextvars.copy_context().run(lambda: twins.block(leaf(5, 4, 6)).sum())
    loss.backward(retain_graph=True)
    loss.backward()
    assert twins.block.read == [1.0, 2.0, 4.0] + [4.0, 2.0, 1.0] * 2
    assert SCALE.get() == 1.0


def test_a_joint_call_runs_each_micro_batch_in_its_own_context() -> None:
    twins, inputs = make_twins(Scaled(), chunk_mbs=2), [leaf(3, 4, 6), leaf(5, 4, 6, seed=1)]
    calls = []
    for x, scale in zip(inputs, [2.0, 3.0], strict=True):
        context = contextvars.copy_context()
        context.run(SCALE.set, scale)
        calls.append(BlockCall((x,), {}, run=context.run))
    outputs = run_block(twins.block, calls)
    sum(output.sum() for output in outputs).backward()
    report = twins.counter.take()
    assert (report.blocks, report.chunks) == (1, 5)
    assert twins.block.read == [3.0] * 3 + [2.0] * 4 + [3.0] * 3
    for x, call in zip(inputs, calls, strict=True):
        for part in x.detach().split(2):
            call.run(lambda part=part: twins.plain(part).sum().backward())
    assert all(map(torch.equal, gradients(twins.block), gradients(twins.plain)))


def test_hidden_states_collected_by_a_model_are_those_of_the_plain_model() -> None:
    model, plain = tiny_qwen3(), tiny_qwen3()
    counter, ids = chunk_layers(model, 2), torch.arange(20).view(5, 4)
    ours = model(ids, output_hidden_states=True, use_cache=False)
    theirs = plain(ids, output_hidden_states=True, use_cache=False)
    sum(hidden.square().mean() for hidden in ours.hidden_states).backward()
    sum(hidden.square().mean() for hidden in theirs.hidden_states).backward()
    assert counter.take().chunks == 6
    assert len(ours.hidden_states) == len(theirs.hidden_states) == 3
    for a, b in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert max_error(gradients(model.model), gradients(plain.model)) < 1e-5


# -- dtypes ----------------------------------------------------------------------------------------------------------


def test_autocast_of_forward_holds_in_recomputation() -> None:
    twins, dtypes, x = make_twins(Layer(), chunk_mbs=2), [], leaf(5, 4, 6)
    twins.block.up.register_forward_hook(lambda _m, _args, out: dtypes.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = twins.block(x)
    backward(output.float())
    assert dtypes == [torch.bfloat16] * 6
    parts = []
    for part in reversed(x.detach().split(2)):
        # One context for each: a cast that chunks share would add up their gradients in bf16.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            parts.append(twins.plain(part))
    backward(torch.cat(parts[::-1]).float())
    assert all(map(torch.equal, gradients(twins.block), gradients(twins.plain)))


def test_autocast_of_backward_does_not_reach_recomputation() -> None:
    twins, dtypes = make_twins(Layer(), chunk_mbs=2), []
    twins.block.up.register_forward_hook(lambda _m, _args, out: dtypes.append(out.dtype))
    output = twins.block(leaf(5, 4, 6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        backward(output)
    assert dtypes == [torch.float32] * 6


class WithOnes(Layer):
    """A layer that makes a tensor of the default dtype."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        ones = torch.ones(6)
        self.dtypes = [*getattr(self, "dtypes", []), ones.dtype]
        return (x * ones).tanh() * self.down.bias


def test_default_dtype_of_forward_holds_in_recomputation() -> None:
    twins, x = make_twins(WithOnes(), chunk_mbs=2), leaf(5, 4, 6)
    torch.set_default_dtype(torch.float64)
    try:
        output = twins.block(x)
    finally:
        torch.set_default_dtype(torch.float32)
    backward(output)
    assert output.dtype == torch.float64
    assert twins.block.dtypes == [torch.float64] * 6
    assert torch.get_default_dtype() == torch.float32
