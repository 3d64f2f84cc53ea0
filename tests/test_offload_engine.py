"""The activation store's copies: their order, what they hold, and the memory they use."""

import copy
import functools
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lightning_chunkmbs.arguments import CutRule
from lightning_chunkmbs.host_buffers import HostBuffer, HostBuffers
from lightning_chunkmbs.offload import ActivationStore, StoreSettings
from lightning_chunkmbs.plans import ActivationOffloadPlan
from lightning_chunkmbs.report import StepCounter
from lightning_chunkmbs.stored_activation import Held, StoredActivation
from lightning_chunkmbs.streams import HostStreams
from tests.chunking import caught_warnings, chunk, gradients, leaf
from tests.delayed_streams import DelayedStreams

WIDTH = 4
ROW = WIDTH * 4  # bytes of a sample


def make_store(streams: Any = None, kind: type[ActivationStore] = ActivationStore, **settings: Any) -> ActivationStore:
    streams = streams or HostStreams()
    return kind(StepCounter(), settings=StoreSettings(**settings), streams=lambda device: streams)


def test_settings_are_those_of_the_plan() -> None:
    fields = {"host_memory_gb": 1.5, "min_bytes": 2, "prefetch_bytes": 3, "pin_memory": False}
    plan = ActivationOffloadPlan(apply_modules=["a"], **fields)
    assert StoreSettings.of(plan) == StoreSettings(**fields)
    assert StoreSettings.of(None) == StoreSettings.of(ActivationOffloadPlan(apply_modules=["a"])) == StoreSettings()


def puts(store: ActivationStore, n: int, **how: bool) -> list[StoredActivation]:
    """Put samples 0, 1, ... of one row each, which nobody else holds."""
    return [store.put(torch.full((1, WIDTH), float(i)), **how) for i in range(n)]


def is_loading(handles: list[StoredActivation]) -> list[bool]:
    return [handle.loading is not None for handle in handles]


# -- copies that lag behind ------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer small enough to be run some thousand times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) * x


class InPlace(Layer):
    """A layer that writes its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


class Stack(nn.Module):
    """Blocks with code of their own between them."""

    def __init__(self, blocks: int, store: ActivationStore | None, rule: CutRule | None, kind: type = Layer) -> None:
        super().__init__()
        torch.manual_seed(blocks)
        self.layers = nn.ModuleList(kind() for _ in range(blocks))
        for layer in self.layers:
            chunk(layer, rule=rule, store=store)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x + 1)
        return x.square().mean()


class Setup(NamedTuple):
    """What is trained, of which there are few kinds."""

    blocks: int
    chunk_mbs: int
    rows: tuple[int, ...]
    twice: bool

    @classmethod
    def draw(cls, seed: int) -> "Setup":
        setup = random.Random(seed)
        rows = setup.choice([(4, 4), (5, 2), (3, 3, 3)])
        return cls(setup.choice([1, 2, 3]), setup.choice([1, 2, 3]), rows, setup.random() < 0.2)


def train(store: ActivationStore | None, setup: Setup) -> list[Tensor | None]:
    """One pass that is dropped, then micro-batches one by one; backward may run twice."""
    model = Stack(setup.blocks, store, CutRule(setup.chunk_mbs))
    inputs = [leaf(n, WIDTH, seed=i) for i, n in enumerate(setup.rows)]
    model(inputs[0])
    for x in inputs:
        loss = model(x)
        if setup.twice:
            loss.backward(retain_graph=True)
        loss.backward()
    return [*gradients(model), *(x.grad for x in inputs)]


@functools.cache
def train_without_store(setup: Setup) -> list[Tensor | None]:
    return train(None, setup)


def settings_of(setup: random.Random) -> dict[str, Any]:
    return {
        "prefetch_bytes": setup.choice([None, 0, 3 * ROW, 1000 * ROW]),
        "min_bytes": setup.choice([0, 0, 2 * ROW]),
        "host_memory_gb": setup.choice([None, None, 5 * ROW / 1e9]),
    }


@pytest.mark.filterwarnings("ignore:Entry activations take")
@pytest.mark.parametrize("part", range(4))
def test_gradients_are_bitwise_those_without_store_however_late_copies_run(part: int) -> None:
    copies = 0
    for seed in range(part, 208, 4):
        setup = Setup.draw(seed)
        streams = DelayedStreams(seed if seed % 3 else None)
        with streams:
            store = make_store(streams, **settings_of(random.Random(seed)))
            got = train(store, setup)
        assert streams.faults == [], seed
        assert all(map(torch.equal, got, train_without_store(setup))), seed
        assert store.live_bytes == 0, seed
        copies += streams.copies
    assert copies > 52 * 8


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_blocks_that_write_their_input_in_place_are_right(seed: int | None) -> None:
    results, x = [], leaf(3, WIDTH)
    plain = nn.Sequential(*(InPlace() for _ in range(2)))
    chunked, streams = copy.deepcopy(plain), DelayedStreams(seed)
    with streams:
        store = make_store(streams)
        for layer in chunked:
            chunk(layer, rule=None, store=store)
        for model in (plain, chunked):
            for _ in range(3):
                (model(x + 1).square().mean()).backward()
            results.append(gradients(model))
    assert all(map(torch.equal, *results))
    assert streams.faults == []
    assert streams.copies == 2 * 3 * 2


def there_and_back(kind: type[ActivationStore], seed: int | None = None) -> tuple[bool, list[str]]:
    """Put and take in the order of a step, and put again while copies back run; return whether all came back."""
    streams, right = DelayedStreams(seed), []
    with streams:
        store = make_store(streams, kind=kind)
        for _ in range(2):
            handles, gradients = puts(store, 4), []
            for i in reversed(range(4)):
                taken = store.take(handles.pop())
                right.append(taken.sum() == i * WIDTH)
                gradients.append(store.put(taken * 3))
                del taken
            right += [store.take(gradients.pop()).sum() == i * WIDTH * 3 for i in range(4)]
    assert streams.copies >= 2 * 16
    return all(right), streams.faults


class TakesBeforeTheCopyBackHasEnded(ActivationStore):
    def _wait_for_load(self, compute: Any, loading: Held) -> None:
        pass


class ReusesABufferThatIsStillRead(ActivationStore):
    def _load(self, activation: StoredActivation) -> Held:
        loading = super()._load(activation)
        assert activation.buffer is not None
        activation._give_back(activation.buffer)
        activation._give_back = lambda buffer: None
        return loading

    def _wait_for_buffer(self, lane: Any, buffer: HostBuffer) -> None:
        pass


class PrefetchesAnotherChunk(ActivationStore):
    def _prefetch(self, activation: StoredActivation, forward: bool) -> None:
        for ahead in activation.neighbours(forward):
            ahead.loading = self._load(activation)
            return


class FreesTheSource(ActivationStore):
    def _send(self, activation: StoredActivation, tensor: Tensor, wait: bool) -> None:
        super()._send(activation, tensor, wait)
        assert activation.held is not None
        activation.held.tensor = None


class LoadsBeforeItHasSent(ActivationStore):
    def _load(self, activation: StoredActivation) -> Held:
        buffer = activation.buffer
        assert buffer is not None
        buffer.filled = self._lane(activation.device).streams.compute().record()
        return super()._load(activation)


class CopiesBeforeItIsComputed(ActivationStore):
    def _wait_for_compute(self, stream: Any, compute: Any) -> None:
        pass


MISTAKES = {
    TakesBeforeTheCopyBackHasEnded: "",
    ReusesABufferThatIsStillRead: "a destination is still read by a copy",
    PrefetchesAnotherChunk: "",
    FreesTheSource: "the source of a copy was freed",
    LoadsBeforeItHasSent: "",
    CopiesBeforeItIsComputed: "the source of a copy was written by compute",
}


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_what_was_put_comes_back(seed: int | None) -> None:
    assert there_and_back(ActivationStore, seed) == (True, [])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_order_of_copies_shows(mistake: type[ActivationStore]) -> None:
    right, faults = there_and_back(mistake)
    assert not right
    assert MISTAKES[mistake] in "".join(faults)


def test_a_prefetch_that_is_dropped_too_early_shows() -> None:
    for waits in (True, False):
        streams = DelayedStreams()
        with streams, patch.object(Held, "release", Held.release if waits else lambda held: None):
            store = make_store(streams)
            handles = puts(store, 3)
            store.take(handles.pop())
            assert is_loading(handles) == [False, True]
            handles.clear()
            store.put(torch.ones(1, WIDTH), wait=True)
            torch.zeros(1)
            for stream in streams._streams:
                while stream.queue:
                    stream.step()
        assert ("the destination of a copy was freed before it ran" in streams.faults) != waits


class Breaks(Layer):
    """A layer that fails in one of its runs."""

    runs, fails_in = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.runs == self.fails_in:
            raise ArithmeticError("broken")
        return super().forward(x)


@pytest.mark.parametrize("fails_in", [1, 2, 4, 6])
def test_after_an_error_while_copies_run_the_next_step_is_right(fails_in: int) -> None:
    plain = Stack(1, None, CutRule(2))
    plain(leaf(5, WIDTH)).backward()
    for seed in (None, 0, 1):
        streams = DelayedStreams(seed)
        with streams:
            store = make_store(streams)
            model = Stack(1, store, CutRule(2), Breaks)
            model.layers[0].fails_in = fails_in
            with pytest.raises(ArithmeticError, match="broken"):
                model(leaf(5, WIDTH)).backward()
            model.zero_grad()
            model(leaf(5, WIDTH)).backward()
            assert store.live_bytes == 0
        assert all(map(torch.equal, gradients(model), gradients(plain)))
        assert streams.faults == []


@pytest.mark.parametrize("seed", [None, 0])
def test_tensors_of_any_layout_come_back_however_late(seed: int | None) -> None:
    x = torch.randn(4, 3, 2)
    layouts = [x, x.permute(2, 0, 1), x[:, 1:], x[0].expand(5, 3, 2), x[:, 0, 0], x[0, 0, 0], x[:0]]
    tensors = [layout.to(dtype) for layout in layouts for dtype in (torch.float32, torch.bfloat16, torch.bool)]
    streams = DelayedStreams(seed)
    with streams:
        store = make_store(streams, prefetch_bytes=100)
        handles = [store.put(tensor) for tensor in tensors]
        assert all(torch.equal(handles.pop().load(), tensor) for tensor in reversed(tensors))
    assert streams.faults == []
    assert streams.copies == 2 * 3 * 6


# -- what is written in place ----------------------------------------------------------------------------------------


def test_with_wait_the_source_may_be_written() -> None:
    streams = DelayedStreams()
    with streams:
        store = make_store(streams)
        x = torch.ones(2, WIDTH)
        handle = store.put(x, wait=True)
        x.zero_()
        assert torch.equal(store.take(handle), torch.ones(2, WIDTH))
    assert streams.faults == []


def test_without_wait_a_source_that_is_written_is_an_error() -> None:
    streams = DelayedStreams()
    with streams:
        store = make_store(streams)
        x = torch.ones(2, WIDTH)
        handle = store.put(x)
        x.zero_()
        puts(store, 3)
        with pytest.raises(RuntimeError, match=r"shape \[2, 4\] on cpu was modified by an inplace.*out of place"):
            store.take(handle)


@pytest.mark.parametrize("wait", [True, False])
def test_what_is_kept_on_the_device_is_safe_from_writes_or_an_error(wait: bool) -> None:
    store, x = make_store(), torch.ones(2, WIDTH)
    handle = store.put(x, wait=wait, keep=True)
    x.zero_()
    if wait:
        store.take(handle).zero_()  # recomputation writes its input like the first run
        assert torch.equal(handle.load(), torch.ones(2, WIDTH))
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            handle.load()


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


# -- host memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [HostStreams, DelayedStreams])
def test_steps_of_one_shape_allocate_host_memory_in_the_first_only(streams: Callable[[], Any]) -> None:
    store, counts = make_store(streams()), []
    model = Stack(3, store, CutRule(2))
    for _ in range(5):
        model(leaf(5, WIDTH)).backward()
        counts.append(store.allocations)
    assert counts == [9] * 5


def host_memory(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def test_buffers_never_exceed_what_was_in_use_at_once() -> None:
    pool, used, draw, most, most_live = HostBuffers(), [], random.Random(0), 0, 0
    for _ in range(3000):
        if used and draw.random() < 0.5:
            pool.give_back(used.pop(draw.randrange(len(used))))
        elif len(used) < 20:
            used.append(pool.get(draw.randint(1, 50), host_memory))
        most, most_live = max(most, pool.in_use), max(most_live, pool.live)
        assert pool.live == sum(buffer.used for buffer in used)
        assert pool.in_use == sum(buffer.nbytes for buffer in used) <= 2 * pool.live
        assert pool.in_use + pool.idle <= most <= 2 * most_live
    assert pool.allocations < 500


def test_batches_of_other_lengths_use_the_same_buffers() -> None:
    store = make_store()
    for lengths in ([8, 8], [5, 7], [8, 6], [4, 8]):
        tensors = [torch.randn(length, WIDTH) for length in lengths]
        handles = [store.put(tensor) for tensor in tensors]
        assert store.live_bytes == sum(lengths) * ROW
        assert all(torch.equal(handles.pop().load(), tensor) for tensor in reversed(tensors))
    assert store.allocations == 2


def test_the_longest_idle_buffer_goes_first_and_the_last_used_is_used_again() -> None:
    pool = HostBuffers()
    first, second, third = pool.get(10, host_memory), pool.get(10, host_memory), pool.get(30, host_memory)
    for buffer in (second, third, first):
        pool.give_back(buffer)
    gone = weakref.ref(second)
    del second, buffer
    assert pool.get(10, host_memory) is first
    pool.get(11, host_memory)  # none fits
    assert gone() is None
    assert pool.allocations == 4
    assert pool.idle == 0


def test_a_buffer_is_freed_after_the_copies_that_use_it() -> None:
    streams = DelayedStreams()
    with streams:
        store = make_store(streams)
        handles = puts(store, 2)
        handles.clear()
        del store
    assert streams.faults == []
    assert not any(stream.queue for stream in streams._streams)


class Unpinnable(HostStreams):
    tries = 0

    def pinned(self, nbytes: int) -> Tensor:
        self.tries += 1
        if self.tries > 1:
            raise RuntimeError("no more locked memory")
        return super().pinned(nbytes)


def test_memory_that_cannot_be_pinned_is_pageable_with_one_warning() -> None:
    streams = Unpinnable()
    store = make_store(streams)
    with caught_warnings() as messages:
        handles = puts(store, 4)
    assert [handle.load()[0, 0] for handle in handles] == [0, 1, 2, 3]
    (message,) = messages
    assert f"could not be pinned (no more locked memory); {ROW} bytes were" in message
    assert streams.tries == 2


def test_pinning_can_be_switched_off() -> None:
    streams = Unpinnable()
    puts(make_store(streams, pin_memory=False), 4)
    assert streams.tries == 0
