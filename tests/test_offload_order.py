"""The order of the activation store's copies, on streams whose copies run late; and that a mistake in it shows."""

import copy
import functools
import random
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lightning_chunkmbs.arguments import CutRule
from lightning_chunkmbs.host_buffers import HostBuffer
from lightning_chunkmbs.offload import ActivationStore
from lightning_chunkmbs.stored_activation import Held, StoredActivation
from tests.chunking import chunk, gradients, leaf
from tests.delayed_streams import DelayedStreams
from tests.offloading import ROW, WIDTH, Layer, Stack, is_loading, make_store, puts


class InPlace(Layer):
    """A layer that writes its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


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
