"""Host memory of the activation store: how much, used again, pinned or not."""

import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_chunkmbs.arguments import CutRule
from lightning_chunkmbs.host_buffers import HostBuffers
from lightning_chunkmbs.streams import HostStreams
from tests.chunking import caught_warnings, leaf
from tests.delayed_streams import DelayedStreams
from tests.offloading import ROW, WIDTH, Stack, make_store, puts


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
