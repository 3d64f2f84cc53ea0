"""The activation store: what stays on the device, what is brought back ahead of time, what is held."""

import copy
import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lightning_chunkmbs.arguments import CutRule
from lightning_chunkmbs.offload import StoreSettings
from lightning_chunkmbs.plans import ActivationOffloadPlan
from lightning_chunkmbs.stored_activation import StoredActivation
from tests.chunking import caught_warnings, leaf
from tests.delayed_streams import DelayedStreams
from tests.offloading import ROW, WIDTH, Stack, is_loading, make_store, puts


def test_settings_are_those_of_the_plan() -> None:
    fields = {"host_memory_gb": 1.5, "min_bytes": 2, "prefetch_bytes": 3, "pin_memory": False}
    plan = ActivationOffloadPlan(apply_modules=["a"], **fields)
    assert StoreSettings.of(plan) == StoreSettings(**fields)
    assert StoreSettings.of(None) == StoreSettings.of(ActivationOffloadPlan(apply_modules=["a"])) == StoreSettings()


# -- what stays on the device ----------------------------------------------------------------------------------------


def test_what_is_kept_has_memory_of_its_own_and_does_not_travel() -> None:
    store, batch = make_store(), torch.randn(5, WIDTH)
    whole, part = store.put(batch, keep=True), store.put(batch[1:2], keep=True)
    assert whole.load().data_ptr() == batch.data_ptr()
    assert part.load().untyped_storage().nbytes() == ROW
    assert torch.equal(part.load(), batch[1:2])
    assert store.live_bytes == store.allocations == store._counter.take().offloaded_bytes == 0


def test_small_activations_stay_on_the_device() -> None:
    store = make_store(min_bytes=2 * ROW)
    small, large = store.put(torch.ones(1, WIDTH)), store.put(torch.ones(2, WIDTH))
    assert store.live_bytes == large.nbytes == 2 * ROW
    assert torch.equal(torch.cat([small.load(), large.load()]), torch.ones(3, WIDTH))
    report = store._counter.take()
    assert report.offloaded_bytes == report.reloaded_bytes == 2 * ROW


def test_what_exceeds_the_budget_stays_on_the_device_with_one_warning() -> None:
    budget = 5 * ROW + 1
    store, allocated = make_store(host_memory_gb=budget / 1e9), []
    model = Stack(3, store, CutRule(2))
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: allocated.append(store._buffers.in_use + store._buffers.idle))
    with caught_warnings() as messages:
        for rows in (4, 5, 3, 6):
            model(leaf(rows, WIDTH)).backward()
    (message,) = [message for message in messages if "host" in message]
    assert "more than host_memory_gb: 8.1e-08 allows" in message
    assert "Raise activation_offload_plan.host_memory_gb" in message
    assert 4 * ROW <= max(allocated) <= budget
    assert store.live_bytes == 0


# -- ahead of time ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("room", "ahead"), [(None, 1), (0, 0), (ROW - 1, 0), (ROW, 1), (3 * ROW, 3), (99 * ROW, 4)])
def test_as_many_activations_are_prefetched_as_fit(room: int | None, ahead: int) -> None:
    store = make_store(prefetch_bytes=room)
    handles = puts(store, 5)
    for left in reversed(range(5)):
        assert torch.equal(handles.pop().load(), torch.full((1, WIDTH), float(left)))
        expected = min(ahead, left)
        assert is_loading(handles) == [False] * (left - expected) + [True] * expected
    assert store._counter.take().reloaded_bytes == 5 * ROW  # nothing was brought back twice


def test_one_may_tell_that_the_next_put_is_taken_next() -> None:
    store = make_store()
    handles = puts(store, 3)
    for i, handle in enumerate(handles):
        assert handle.load(forward=True)[0, 0] == i
        assert is_loading(handles) == [j == i + 1 for j in range(3)]
    assert store._counter.take().reloaded_bytes == 3 * ROW


def test_what_is_taken_next_is_found_without_a_walk_over_all() -> None:
    looked_at = []

    def neighbours(activation: StoredActivation, forward: bool) -> Iterator[StoredActivation]:
        for neighbour in original(activation, forward):
            looked_at.append(neighbour.shape)
            yield neighbour

    store, original = make_store(), StoredActivation.neighbours
    handles = puts(store, 50)
    with patch.object(StoredActivation, "neighbours", neighbours):
        handles.pop().load()
    assert is_loading(handles) == [False] * 48 + [True]
    assert len(looked_at) == 1


def test_another_order_is_right_and_holds_no_more_memory() -> None:
    store = make_store(prefetch_bytes=2 * ROW)
    handles = puts(store, 12)
    for i in random.Random(0).sample(range(12), 12):
        assert handles[i].load()[0, 0] == i
        assert sum(is_loading(handles)) <= 2


def test_a_neighbour_that_is_gone_is_passed_over() -> None:
    store = make_store()
    handles = puts(store, 4)
    del handles[1:3]
    handles[1].load()
    assert is_loading(handles) == [True, False]


def test_a_prefetched_activation_that_is_never_taken_leaves_nothing() -> None:
    streams = DelayedStreams()
    with streams:
        store = make_store(streams)
        handles = puts(store, 2)
        handles.pop().load()
        assert handles[0].loading is not None
        assert handles[0].loading.tensor is not None
        on_device = weakref.ref(handles[0].loading.tensor.untyped_storage())
        handles.clear()
        assert on_device() is None
        assert store.live_bytes == 0
    assert streams.faults == []


def test_a_prefetch_for_another_stream_is_not_used() -> None:
    store = make_store()
    handles = puts(store, 2)
    handles[1].load()
    assert handles[0].loading is not None
    handles[0].loading.owner = None  # equals no stream
    assert handles[0].load()[0, 0] == 0
    assert store._counter.take().reloaded_bytes == 3 * ROW


# -- what is held ----------------------------------------------------------------------------------------------------


def test_no_more_than_two_sources_are_held() -> None:
    streams, sources = DelayedStreams(), []
    with streams:
        store = make_store(streams)
        handles = []
        for _ in range(6):
            x = torch.ones(1, WIDTH)
            sources.append(weakref.ref(x.untyped_storage()))
            handles.append(store.put(x))
            del x
            assert [source() is not None for source in sources[:-2]] == [False] * (len(sources) - 2)
        assert [source() is not None for source in sources[-2:]] == [True, True]
        handles.clear()
        assert not any(source() for source in sources)
        assert store.live_bytes == 0
    assert streams.faults == []


def test_handles_in_a_cycle_are_collected() -> None:
    store = make_store()
    cycle: list[Any] = [*puts(store, 3)]
    cycle.append(cycle)
    last = store.put(torch.ones(1, WIDTH))
    del cycle
    gc.collect()
    assert store.live_bytes == ROW
    last.load()


def test_a_failing_copy_leaves_nothing() -> None:
    store = make_store()
    breaks = patch("lightning_chunkmbs.streams._HostStream.copy", lambda *_: 1 // 0)
    with breaks, pytest.raises(ZeroDivisionError):
        puts(store, 1)
    assert store.live_bytes == 0
    assert [handle.load()[0, 0] for handle in puts(store, 2)] == [0, 1]


def test_a_handle_knows_what_it_holds() -> None:
    store, x = make_store(), torch.randn(3, 2).bfloat16().t()
    handle = store.put(x)
    assert (handle.shape, handle.dtype, handle.device, handle.nbytes) == (x.shape, x.dtype, x.device, 12)
    back = handle.load()
    assert back.stride() == x.stride()
    assert back.untyped_storage().nbytes() == 12
    assert torch.equal(handle.load(), x)


def test_what_has_flags_beside_its_memory_comes_back() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    for tensor in (x.conj(), x.conj().imag):
        assert torch.equal(make_store().put(tensor).load(), tensor)


class Hollow(Tensor):
    """A tensor without memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def test_tensors_without_memory_pass_the_hooks() -> None:
    hollow = Tensor._make_wrapper_subclass(Hollow, (1, WIDTH))
    store, x = make_store(), leaf(1, WIDTH)
    for entry in (hollow, x):
        hooks = store.hooks(entry)
        assert hooks.pack_hook(hollow) is hollow
        assert hooks.unpack_hook(hollow) is hollow
    assert isinstance(hooks.pack_hook(x), StoredActivation)


def test_a_copied_store_is_a_store_of_its_own() -> None:
    store = make_store(min_bytes=1)
    handles = puts(store, 2)
    other = copy.deepcopy(store)
    assert other.live_bytes == 0
    assert other._settings == store._settings
    assert puts(other, 1)[0].load()[0, 0] == 0
    assert store.live_bytes == 2 * ROW
    del handles
