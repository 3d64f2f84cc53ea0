"""Streams: which backend a device gets, what it asks of torch, and the twin that shows what a store forgets."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_chunkmbs.arguments import CutRule
from lightning_chunkmbs.offload import ActivationStore, StoreSettings
from lightning_chunkmbs.report import StepCounter
from lightning_chunkmbs.streams import DeviceStreams, HostStreams, register, streams_for
from tests.chunking import backward, chunk, gradients, leaf
from tests.delayed_streams import DelayedStreams

CPU = torch.device("cpu")


# -- which backend ---------------------------------------------------------------------------------------------------


def test_a_cpu_has_no_streams() -> None:
    assert isinstance(streams_for(CPU), HostStreams)


def test_a_device_is_asked_whether_it_has_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, kind in ((SimpleNamespace(Stream=object), DeviceStreams), (SimpleNamespace(), HostStreams)):
        monkeypatch.setattr(torch, "get_device_module", lambda device, module=module: module)
        assert isinstance(streams_for(torch.device("xpu", 0)), kind)


def test_copies_on_the_host_run_at_once() -> None:
    streams, dst = HostStreams(), torch.zeros(3)
    stream = streams.new_stream()
    stream.copy(dst, torch.ones(3))
    assert dst.sum() == 3
    stream.wait(streams.compute().record())
    stream.record().synchronize()
    assert stream.record().done()
    assert stream == streams.compute()
    assert streams.pinned(5).nbytes == streams.pinned(5).untyped_storage().nbytes() == 5


# -- what is asked of torch ------------------------------------------------------------------------------------------


class FakeModule:
    """Stands for torch's module of a device; notes what is done."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = self.Stream("default")

    def Stream(self, device: Any) -> Any:
        stream = SimpleNamespace(name=str(device))
        event = SimpleNamespace(query=lambda: True, synchronize=lambda: self.log.append("synchronize"))
        stream.record_event = lambda: self.log.append(f"{stream.name} records") or event
        stream.wait_event = lambda event: self.log.append(f"{stream.name} waits")
        return stream

    def current_stream(self, device: Any) -> Any:
        return self.now

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream
        self.log.append(f"enter {stream.name}")
        yield
        self.log.append(f"leave {stream.name}")
        self.now = before


def test_work_goes_to_the_stream_that_is_asked() -> None:
    module, dst = FakeModule(), torch.zeros(2)
    streams = DeviceStreams(module, torch.device("xpu", 1))
    side, compute = streams.new_stream(), streams.compute()
    side.wait(compute.record())
    side.copy(dst, torch.ones(2))
    side.record().synchronize()
    expected = ["default records", "xpu:1 waits", "enter xpu:1", "leave xpu:1", "xpu:1 records", "synchronize"]
    assert module.log == expected
    assert dst.sum() == 2
    assert side.record().done()


def test_the_compute_stream_is_looked_up_each_time() -> None:
    module = FakeModule()
    streams = DeviceStreams(module, torch.device("xpu", 0))
    before = streams.compute()
    assert before == streams.compute()
    module.now = module.Stream("another")
    assert before != streams.compute()


class FakeCudart:
    """Stands for the CUDA runtime; notes what is registered."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        if not self.error:
            assert flags == 1  # portable: pinned for all devices of the process
            self.registered[pointer] = nbytes
        return self.error

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.registered[pointer]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return f"error {error}"


def test_memory_is_pinned_at_its_exact_size_for_as_long_as_it_lives() -> None:
    cudart, memory = FakeCudart(), torch.empty(1000, dtype=torch.uint8)
    register(memory, cudart, CPU)
    assert cudart.registered == {memory.data_ptr(): 1000}
    view = memory[10:]
    gc.collect()
    assert cudart.registered
    del view, memory
    assert not cudart.registered


def test_memory_that_cuda_refuses_is_an_error_and_not_unregistered() -> None:
    cudart, memory = FakeCudart(error=2), torch.empty(1000, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="cudaHostRegister of 1000 bytes: error 2"):
        register(memory, cudart, CPU)
    del memory
    assert not cudart.registered


def test_cuda_memory_is_registered_and_that_of_others_pinned_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart, pinned = FakeCudart(), torch.empty(7, dtype=torch.uint8)
    monkeypatch.setattr(Tensor, "pin_memory", lambda memory: pinned)
    module = SimpleNamespace(cudart=lambda: cudart)
    memory = DeviceStreams(module, torch.device("cuda", 0)).pinned(7)
    assert cudart.registered == {memory.data_ptr(): 7}
    assert DeviceStreams(module, torch.device("xpu", 0)).pinned(7) is pinned


# -- copies under load, on a device and on its twin ------------------------------------------------------------------

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZE = 1 << 16


class Loaded:
    """A store on a device, or on the twin, whose streams can be made to lag behind."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device, 0) if device == "cuda" else CPU
        self.twin = DelayedStreams() if device == "cpu" else None
        self.store = ActivationStore(
            StepCounter(), settings=StoreSettings(), streams=lambda d: self.twin or streams_for(d)
        )

    def lag(self, which: str) -> None:
        """Let a stream (out, back, compute) do nothing for a while; on the twin copies always lag."""
        if self.twin is not None:
            return
        if which == "compute":
            torch.cuda._sleep(100_000_000)
        else:
            with torch.cuda.stream(getattr(self.store._lane(self.device), which)._stream):
                torch.cuda._sleep(100_000_000)

    def full(self, value: float) -> Tensor:
        return torch.full((SIZE,), value, device=self.device) * 2

    def sound(self) -> bool:
        return self.twin is None or not self.twin.faults


@contextmanager
def loaded(device: str) -> Iterator[Loaded]:
    lane = Loaded(device)
    if lane.twin is None:
        yield lane
    else:
        with lane.twin:
            yield lane


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", ["compute", "out", "back"])
def test_copies_are_right_when_a_stream_lags_behind(device: str, which: str) -> None:
    with loaded(device) as lane:
        for _ in range(3):
            lane.lag(which)
            handles = [lane.store.put(lane.full(i)) for i in range(6)]
            noise = [lane.full(-1) for _ in range(6)]  # takes up memory that was given back too early
            lane.lag(which)
            sums = [handles.pop().load().sum() for _ in range(6)]
            assert [float(total) for total in sums] == [2 * i * SIZE for i in reversed(range(6))]
            del noise
        assert lane.store.live_bytes == 0
        assert lane.store.allocations == 6
        assert lane.sound()


@pytest.mark.parametrize("device", DEVICES)
def test_a_prefetch_that_is_dropped_harms_nobody(device: str) -> None:
    with loaded(device) as lane:
        handles = [lane.store.put(lane.full(i)) for i in range(2)]
        lane.lag("back")
        handles.pop().load()
        handles.clear()  # its copy back still runs
        others = [lane.full(7) for _ in range(4)]
        assert [float(other.sum()) for other in others] == [14 * SIZE] * 4
        assert lane.sound()


@pytest.mark.parametrize("device", DEVICES)
def test_the_source_may_be_written_after_waiting(device: str) -> None:
    with loaded(device) as lane:
        x = lane.full(1)
        lane.lag("compute")
        handle = lane.store.put(x, wait=True)
        x.zero_()
        assert float(handle.load().sum()) == 2 * SIZE
        assert lane.sound()


@pytest.mark.parametrize("device", DEVICES)
def test_putting_and_taking_do_not_hold_up_the_host(device: str) -> None:
    with loaded(device) as lane:
        handles = [lane.store.put(lane.full(i)) for i in range(4)]
        handles.pop()  # pinning memory may hold up the host, so there is some for the next
        if lane.twin is None:
            torch.cuda.synchronize()
        lane.lag("compute")
        handles.append(lane.store.put(lane.full(3)))
        if lane.twin is not None:
            assert any(stream.queue for stream in lane.twin._streams)
        while handles:
            handles.pop().load()
        if lane.twin is None:
            assert not torch.cuda.current_stream().query()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", ["compute", "out", "back"])
def test_gradients_are_bitwise_those_without_store_when_a_stream_lags_behind(device: str, which: str) -> None:
    results = []
    with loaded(device) as lane:
        for store in (lane.store, None):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).to(lane.device)
            for layer in model:
                chunk(layer, rule=CutRule(2), store=store)
            x = leaf(7, 64).detach().to(lane.device).requires_grad_()
            for _ in range(2):
                lane.lag(which)
                output = model(x * 2)
                lane.lag(which)
                backward(output)
                del output
            results.append([x.grad, *gradients(model)])
        assert all(map(torch.equal, *results))
        assert lane.store.live_bytes == 0
        assert lane.store.allocations == 12
        assert lane.sound()


@pytest.mark.gpu
def test_host_memory_is_pinned_at_its_exact_size() -> None:
    memory = streams_for(torch.device("cuda", 0)).pinned(1000)
    assert memory.is_pinned()
    assert memory.untyped_storage().nbytes() == 1000
