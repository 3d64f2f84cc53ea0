"""The activation store: what it takes out of the graph, what it counts, and that nothing stays behind."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_chunkmbs.arguments import CutRule
from lightning_chunkmbs.block import block_settings
from lightning_chunkmbs.offload import ActivationStore
from lightning_chunkmbs.report import StepCounter
from lightning_chunkmbs.stored_activation import StoredActivation
from tests.chunking import (
    Twins,
    again,
    backward,
    chunk,
    chunk_layers,
    gradients,
    leaf,
    make_twins,
    max_error,
    tiny_qwen3,
)


class Layer(nn.Module):
    """A layer that saves its input, a buffer, a parameter, and side arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)
        self.gain = nn.Parameter(torch.linspace(1, 2, 6))
        self.register_buffer("table", torch.linspace(0, 1, 6))

    def forward(self, x: Tensor, *sides: Tensor) -> Tensor:
        hidden = torch.tanh(self.linear(x)) * self.gain * self.table * x
        for side in sides:
            hidden = hidden * side
        return hidden


def record_puts(store: ActivationStore) -> list[tuple[Tensor, StoredActivation]]:
    """Record what is put into a store from now on."""
    puts, put = [], store.put

    def recording(tensor: Tensor, **how: bool) -> StoredActivation:
        puts.append((tensor, put(tensor, **how)))
        return puts[-1][1]

    store.put = recording  # type: ignore[method-assign]
    return puts


# -- out of the graph and back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_mbs", [1, 2, 8])
@pytest.mark.parametrize("offload", [True, False])
def test_the_entry_activation_leaves_the_graph(chunk_mbs: int, offload: bool) -> None:
    twins = make_twins(Layer(), chunk_mbs=chunk_mbs, offload=offload)
    x = leaf(5, 4, 6) * 2
    storage = StorageWeakRef(x.untyped_storage())
    output = twins.block(x)
    del x
    assert storage.expired() == offload
    backward(output)
    assert storage.expired()
    assert (twins.counter.take().offloaded_bytes > 0) == offload


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_host_copies_have_storage_of_their_own(batch_dim: int) -> None:
    twins, x = make_twins(Layer(), chunk_mbs=2, offload=True, batch_dim=batch_dim), leaf(5, 5, 6)
    puts = record_puts(twins.store)
    output = twins.block(x)
    hosts = [handle.host() for _, handle in puts]
    chunks = x.detach().split(2, batch_dim)[::-1]  # the last chunk runs first
    for host, part in zip(hosts, chunks, strict=True):
        assert torch.equal(host, part)
        assert not host.requires_grad
        assert host.untyped_storage().nbytes() == part.numel() * 4
    assert len({host.data_ptr() for host in hosts} | {x.data_ptr()}) == 4
    backward(output)


@pytest.mark.parametrize("chunk_mbs", [1, 2, 3, 8])
@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_bitwise_those_without_store(chunk_mbs: int, batch_dim: int, dtype: torch.dtype) -> None:
    module = Layer().to(dtype)
    x, side = leaf(5, 8, 6, dtype=dtype), leaf(6, seed=1, dtype=dtype)
    results = []
    for offload in (True, False):
        twins = make_twins(module, chunk_mbs=chunk_mbs, batch_dim=batch_dim, offload=offload)
        inputs = again(x, side)
        backward(twins.block(*inputs))
        results.append([*gradients(twins.block), *(t.grad for t in inputs)])
        report = twins.counter.take()
        assert report.chunks == math.ceil(x.size(batch_dim) / chunk_mbs)
        assert report.offloaded_bytes == report.reloaded_bytes == (x.nbytes if offload else 0)
    assert all(map(torch.equal, *results))


def test_a_model_trains_bitwise_alike_with_and_without_store() -> None:
    results, moved = [], StepCounter()
    for store in (ActivationStore(moved), None):
        model = tiny_qwen3()
        counter = chunk_layers(model, 2, store)
        model(torch.arange(20).view(5, 4), use_cache=False).logits.square().mean().backward()
        assert counter.take().chunks == 6
        assert moved.take().offloaded_bytes == (2 * 5 * 4 * 16 * 4 if store else 0)
        results.append(gradients(model))
    assert all(map(torch.equal, *results))


def test_backward_can_run_twice() -> None:
    twins, x = make_twins(Layer(), chunk_mbs=2, offload=True), leaf(5, 4, 6)
    loss = twins.block(x).square().mean()
    loss.backward(retain_graph=True)
    once = [grad.clone() for grad in [x.grad, *gradients(twins.block)]]
    loss.backward()
    assert all(map(torch.equal, [x.grad, *gradients(twins.block)], [2 * grad for grad in once]))
    report = twins.counter.take()
    assert (report.offloaded_bytes, report.reloaded_bytes) == (x.nbytes, 2 * x.nbytes)


# -- what is put -----------------------------------------------------------------------------------------------------


def _census(twins: Twins, x: Tensor, *sides: Tensor) -> list[Tensor]:
    puts = record_puts(twins.store)
    backward(twins.block(x, *sides))
    return [tensor for tensor, _ in puts]


@pytest.mark.parametrize("declared", [(0,), (0, 1, 2, 3)])
def test_only_chunks_of_the_entry_activation_are_put(declared: tuple[int, ...]) -> None:
    twins, x = make_twins(Layer(), chunk_mbs=2, offload=True, arg_indexs=declared), leaf(5, 1, 6)
    # A side argument, a parameter, a view of a parameter, a buffer, and one with the shape of a chunk.
    sides = [leaf(1, 1, 6), twins.block.gain.view(1, 1, 6), twins.block.linear.weight[:1], twins.block.table]
    sides = sides[:3] if len(declared) > 1 else [*sides, leaf(1, 1, 6, seed=3)]
    put = _census(twins, x, *sides)
    assert [len(tensor) for tensor in put] == [1, 2, 2]
    assert {tensor.untyped_storage().data_ptr() for tensor in put} == {x.data_ptr()}
    assert all(grad is not None and grad.abs().sum() > 0 for grad in gradients(twins.block))


@pytest.mark.parametrize("rule", [{"arg_indexs": (0,)}, {"arg_indexs": (0, 1)}, {"cut": False}])
@pytest.mark.parametrize("kind", ["side argument", "parameter"])
def test_a_side_argument_is_not_put_when_the_entry_needs_no_gradient(rule: dict[str, Any], kind: str) -> None:
    twins, x = make_twins(Layer(), offload=True, **rule), leaf(5, 4, 6).detach()
    side = leaf(1, 4, 6, seed=1) * 2 if kind == "side argument" else nn.Parameter(leaf(1, 4, 6).detach())
    assert _census(twins, x, side) == []
    assert twins.counter.take().chunks == (5 if rule.get("cut", True) else 1)


def test_an_entry_that_is_a_view_of_a_parameter_is_not_put() -> None:
    twins, queries = make_twins(Layer(), chunk_mbs=2, offload=True), nn.Parameter(leaf(4, 6).detach())
    assert _census(twins, queries.expand(5, 4, 6)) == []
    assert twins.counter.take().chunks == 3
    assert queries.grad is not None


def test_a_block_that_is_not_cut_puts_its_entry_activation() -> None:
    twins, x = make_twins(Layer(), cut=False, offload=True), leaf(5, 4, 6)
    (put,) = _census(twins, x, leaf(6, seed=1))
    assert put.data_ptr() == x.data_ptr()
    assert twins.counter.take().offloaded_bytes == x.nbytes


def test_nothing_is_put_when_nothing_needs_a_gradient() -> None:
    twins = make_twins(Layer(), chunk_mbs=2, offload=True)
    assert _census(twins, leaf(5, 4, 6).detach()) == []
    assert twins.counter.take().chunks == 3
    assert all(grad is not None for grad in gradients(twins.block))


# -- nothing stays behind --------------------------------------------------------------------------------------------


def test_backward_leaves_nothing_even_while_its_output_lives() -> None:
    twins, x = make_twins(Layer(), chunk_mbs=2, offload=True), leaf(5, 4, 6)
    output = twins.block(x)
    assert twins.store.live_bytes == x.nbytes
    backward(output)
    assert twins.store.live_bytes == 0
    assert output.requires_grad


def test_a_graph_that_is_dropped_leaves_nothing() -> None:
    twins, x = make_twins(Layer(), chunk_mbs=2, offload=True), leaf(5, 4, 6)
    output = twins.block(x)
    assert twins.store.live_bytes == x.nbytes
    del output
    assert twins.store.live_bytes == 0


def test_bytes_leave_chunk_by_chunk() -> None:
    twins, x, live = make_twins(Layer(), chunk_mbs=2, offload=True), leaf(6, 4, 6), []
    output = twins.block(x)
    twins.block.linear.register_forward_pre_hook(lambda *_: live.append(twins.store.live_bytes))
    backward(output)
    assert live == [x.nbytes, x.nbytes * 2 // 3, x.nbytes // 3]


class Breaks(Layer):
    """A layer that fails in one of its runs."""

    runs, fails_in = 0, 0

    def forward(self, x: Tensor, *sides: Tensor) -> Tensor:
        self.runs += 1
        if self.runs == self.fails_in:
            raise ArithmeticError("broken")
        return super().forward(x, *sides)


@pytest.mark.parametrize("fails_in", [1, 2, 3, 4, 5, 6])
def test_an_error_in_forward_or_recomputation_leaves_nothing(fails_in: int) -> None:
    twins, x = make_twins(Breaks(), chunk_mbs=2, offload=True), leaf(5, 4, 6)
    twins.block.fails_in = fails_in
    with pytest.raises(ArithmeticError, match="broken"):
        backward(twins.block(x))
    # Of a failed backward, torch's engine itself keeps what it had not come to until the next one.
    assert twins.store.live_bytes == {4: 3 * 96, 5: 96}.get(fails_in, 0)
    assert twins.counter.take().offloaded_bytes == {1: 96, 2: 3 * 96}.get(fails_in, 5 * 96)
    twins.block.zero_grad()
    backward(twins.block(*again(x)))
    backward(twins.plain(x.detach()))
    assert twins.store.live_bytes == 0
    assert max_error(gradients(twins.block), gradients(twins.plain)) < 1e-6


def test_stores_of_two_models_do_not_meet() -> None:
    first, second = (make_twins(Layer(), chunk_mbs=2, offload=True) for _ in range(2))
    a, b = first.block(leaf(5, 4, 6)), second.block(leaf(3, 4, 6))
    assert (first.store.live_bytes, second.store.live_bytes) == (5 * 96, 3 * 96)
    backward(a)
    assert (first.store.live_bytes, second.store.live_bytes) == (0, 3 * 96)
    del b
    assert second.store.live_bytes == 0
    assert (first.counter.take().reloaded_bytes, second.counter.take().reloaded_bytes) == (5 * 96, 0)


def test_a_stack_shares_one_store() -> None:
    stack, counter = nn.Sequential(*(Layer() for _ in range(3))), StepCounter()
    store = ActivationStore(counter)
    for block in stack:
        chunk(block, rule=CutRule(2), counter=counter, store=store)
    assert all(block_settings(block).store is store for block in stack)
    output = stack(leaf(5, 4, 6))
    assert store.live_bytes == 3 * 5 * 96
    backward(output)
    report = counter.take()
    assert store.live_bytes == 0
    assert (report.blocks, report.chunks) == (3, 9)
    assert report.offloaded_bytes == report.reloaded_bytes == 3 * 5 * 96


# -- any tensor ------------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    dtype=st.sampled_from(DTYPES),
    reverse=st.booleans(),
    expanded=st.booleans(),
)
def test_put_and_take_give_any_tensor_back(shape: list[int], dtype: torch.dtype, reverse: bool, expanded: bool) -> None:
    counter = StepCounter()
    store, tensor = ActivationStore(counter), torch.randn(shape).to(dtype)
    tensor = tensor.permute(tuple(reversed(range(len(shape))))) if reverse else tensor
    tensor = tensor.expand(3, *tensor.shape) if expanded else tensor
    handle = store.put(tensor)
    nbytes = tensor.numel() * tensor.element_size()
    assert store.live_bytes == nbytes
    back = store.take(handle)
    assert back.dtype == dtype
    assert torch.equal(back, tensor)
    assert nbytes == 0 or back.data_ptr() != tensor.data_ptr()
    del handle
    assert store.live_bytes == 0
    report = counter.take()
    assert report.offloaded_bytes == report.reloaded_bytes == nbytes
