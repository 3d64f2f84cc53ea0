"""Activation store: entry activations of chunks wait on the host until they are recomputed.

[Note: who waits for what]
Copies run on two streams of their own, one out to the host and one back, beside the compute stream.
1. A copy out waits for the compute that made its source, and for copies that may still use its host buffer.
2. Its source is held until the compute stream has been told to wait for the copy: only then may the memory be used
   again, which the allocator does in the order of the compute stream. (``record_stream`` would do it too, but later
   than needed and at a moment that nobody can foresee.)
3. A copy back waits for the copy out, and for the compute stream, which may still use the memory it writes to.
4. The compute stream waits for a copy back when its tensor is taken, or when it is dropped without having been taken.
Where it may have to stand still for a copy, the time is counted.
The compute stream is looked up each time: backward may run on another thread with another stream.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .host_buffers import HostBuffer, HostBuffers
from .plans import ActivationOffloadPlan
from .report import Notices, StepCounter
from .stored_activation import Held, StoredActivation
from .streams import Stream, Streams, streams_for

_GB = 10**9


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """How an activation store uses the host; the fields are those of :class:`ActivationOffloadPlan`."""

    host_memory_gb: float | None = None
    min_bytes: int = 0
    prefetch_bytes: int | None = None
    pin_memory: bool = True

    @classmethod
    def of(cls, plan: ActivationOffloadPlan | None) -> StoreSettings:
        """Return what ``plan`` says, or the defaults."""
        return cls(**{name: getattr(plan, name) for name in cls.__dataclass_fields__}) if plan else cls()


class _Lane:
    """The streams to and from one device."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.out = streams.new_stream()
        self.back = streams.new_stream()


class ActivationStore:
    """Takes entry activations out of the graph when they are saved and gives them back for recomputation.

    Nothing is looked up by key, so nothing can be left behind: an activation that the graph drops (after backward,
    after an exception, or because a block's backward never runs) frees its memory on host and device.

    Args:
        counter: counts bytes copied.
        notices: where warnings go.
        settings: how the host is used.
        streams: returns the streams of a device.
    """

    def __init__(
        self,
        counter: StepCounter,
        notices: Notices | None = None,
        settings: StoreSettings | None = None,
        streams: Callable[[torch.device], Streams] = streams_for,
    ) -> None:
        self._counter = counter
        self._notices = notices or Notices()
        self._settings = settings or StoreSettings()
        self._streams = streams
        self._lanes: dict[torch.device, _Lane] = {}
        self._buffers = HostBuffers()
        # Activations die wherever Python collects them, also in the middle of our own work: they only leave word.
        self._returned: deque[HostBuffer] = deque()
        self._sources: deque[Held] = deque()
        self._ahead: list[weakref.ref[StoredActivation]] = []
        self._last: Callable[[], StoredActivation | None] = lambda: None
        self._pageable = not self._settings.pin_memory

    def __reduce__(self) -> tuple[object, ...]:
        # Copies of a model (averages of weights, say) have a store of their own; streams cannot be copied.
        return type(self), (self._counter, self._notices, self._settings, self._streams)

    @property
    def live_bytes(self) -> int:
        """Bytes of activations held on the host now."""
        self._collect()
        return self._buffers.live

    @property
    def allocations(self) -> int:
        """How often host memory was allocated so far; it stands still once steps have the same shapes."""
        return self._buffers.allocations

    def put(
        self, tensor: Tensor, *, wait: bool = False, keep: bool = False, beside: StoredActivation | bool = False
    ) -> StoredActivation:
        """Copy ``tensor`` (any shape, strided) to the host while the caller goes on.

        Args:
            tensor: what to put. Writing it in place before the copy has ended is an error when it is taken.
            wait: let later work of the caller's stream wait for the copy; ``tensor`` may then be written.
            keep: leave it on the device, in memory of its own. So does what is too small or finds no room.
            beside: it will be taken right after this one, or with True after the last one that was put without this, as
                others put so before it.
        """
        self._collect()
        with torch.no_grad():
            # A conjugate is a flag beside the memory, and copying one runs a kernel on the host.
            tensor = dense(tensor.detach().resolve_conj().resolve_neg())
            activation = StoredActivation(tensor, self.take, self._returned.append)
            if keep or not self._has_room(activation):
                self._keep(activation, tensor, wait)
            else:
                self._send(activation, tensor, wait)
        if beside:
            activation.accompany(self._last() if beside is True else beside)
        else:
            activation.follow(self._last())
            self._last = weakref.ref(activation)
        return activation

    def take(self, activation: StoredActivation, *, forward: bool = False) -> Tensor:
        """Return the tensor that was put, on its device, with storage of its own; it may be taken again.

        What was kept on the device is returned as it is: do not write it unless it was put with ``wait``.

        Args:
            activation: what :meth:`put` returned.
            forward: the next to be taken is the one put next, and not the one put before.

        Raises:
            RuntimeError: it was written in place before its copy had ended.
        """
        self._collect()
        activation.check_unchanged()
        with torch.no_grad():
            tensor = self._take_kept(activation) if activation.buffer is None else self._take_loaded(activation)
            if not activation.companion:
                self._prefetch(activation, forward)
        return tensor

    def hooks(self, entry: Tensor, *, wait: bool = False, keep: bool = False) -> saved_tensors_hooks:
        """Return a context in which saving ``entry`` puts it into this store; all else is saved as usual.

        Args:
            entry: the entry activation. One without memory (a wrapper) is saved as usual.
            wait: as in :meth:`put`.
            keep: as in :meth:`put`.
        """
        # Autograd keeps the pack hook as long as what it packed, so the hook must not hold the entry itself.
        place = _memory(entry)

        def pack(saved: Tensor) -> Tensor | StoredActivation:
            # Autograd may hand over a detached alias, so memory is compared and not identity.
            same = place is not None and _memory(saved) == place
            return self.put(saved, wait=wait, keep=keep) if same else saved

        def unpack(packed: Tensor | StoredActivation) -> Tensor:
            return self.take(packed) if isinstance(packed, StoredActivation) else packed

        return saved_tensors_hooks(pack, unpack)

    # -- out -----------------------------------------------------------------------------------------------------------

    def _has_room(self, activation: StoredActivation) -> bool:
        nbytes, limit = activation.nbytes, self._settings.host_memory_gb
        if nbytes == 0 or nbytes < self._settings.min_bytes or activation.device.type == "meta":
            return False
        if limit is None or self._buffers.in_use + nbytes <= limit * _GB:
            return True
        self._notices.warn(
            "host memory",
            f"Entry activations take {self._buffers.in_use / _GB:.3g} GB of host memory and the next has "
            f"{nbytes / _GB:.3g} GB, which is more than host_memory_gb: {limit:g} allows for a rank. What finds no "
            f"room stays on the device. Raise activation_offload_plan.host_memory_gb, or leave it out for no limit.",
        )
        return False

    def _keep(self, activation: StoredActivation, tensor: Tensor, wait: bool) -> None:
        # A chunk is a view of a whole batch, which must be free to go.
        alone = not tensor.numel() or tensor.untyped_storage().nbytes() <= activation.nbytes
        activation.written = wait
        activation.held = Held(tensor if alone and not wait else tensor.clone())

    def _send(self, activation: StoredActivation, tensor: Tensor, wait: bool) -> None:
        lane = self._lane(activation.device)
        compute = lane.streams.compute()
        while len(self._sources) > 1:  # one copy may still run while the next is queued
            self._release(self._sources.popleft(), compute)
        activation.buffer = buffer = self._buffers.get(activation.nbytes, lambda n: self._allocate(lane, n))
        self._counter.keep_most("host_bytes", self._buffers.in_use + self._buffers.idle)
        self._wait_for_compute(lane.out, compute)
        self._wait_for_buffer(lane, buffer)
        lane.out.copy(activation.host(), tensor)
        buffer.filled, buffer.read = lane.out.record(), None
        activation.held = held = Held(tensor, buffer.filled, compute)
        self._counter.add("offloaded_bytes", activation.nbytes)
        self._sources.append(held)
        if wait:
            self._release(held, compute)
        self._release_done()

    def _release(self, held: Held, compute: Stream) -> None:
        with self._exposed(held.owner or compute):
            held.release()

    @contextmanager
    def _exposed(self, stream: Stream) -> Iterator[None]:
        """Count for how long what is done inside lets ``stream`` stand still."""
        start = stream.mark()
        yield
        self._counter.add_later("exposed_copy_seconds", partial(stream.mark().seconds_since, start))

    def _wait_for_compute(self, stream: Stream, compute: Stream) -> None:
        stream.wait(compute.record())

    def _wait_for_buffer(self, lane: _Lane, buffer: HostBuffer) -> None:
        for event in (buffer.filled, buffer.read):
            if event is not None:
                lane.out.wait(event)

    def _allocate(self, lane: _Lane, nbytes: int) -> Tensor:
        if not self._pageable:
            try:
                return lane.streams.pinned(nbytes)
            except RuntimeError as error:
                self._pageable = True
                self._notices.warn(
                    "pageable",
                    f"Host memory for entry activations could not be pinned ({error}); {self._buffers.in_use} bytes "
                    f"were. From here on it is pageable, and copies hold up the host. Raise the limit of locked "
                    f"memory (ulimit -l), or write pin_memory: false in activation_offload_plan.",
                )
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    # -- back ----------------------------------------------------------------------------------------------------------

    def _take_kept(self, activation: StoredActivation) -> Tensor:
        assert activation.held is not None
        assert activation.held.tensor is not None
        return activation.held.tensor.clone() if activation.written else activation.held.tensor.detach()

    def _take_loaded(self, activation: StoredActivation) -> Tensor:
        compute = self._lane(activation.device).streams.compute()
        loading = activation.loading
        if loading is None or loading.owner != compute:
            self._drop_ahead()  # the order is not the one that was guessed
            loading = self._load(activation)
        activation.loading = None
        with self._exposed(compute):
            self._wait_for_load(compute, loading)
        assert loading.tensor is not None
        return loading.tensor

    def _wait_for_load(self, compute: Stream, loading: Held) -> None:
        assert loading.done is not None
        compute.wait(loading.done)

    def _load(self, activation: StoredActivation) -> Held:
        lane, buffer = self._lane(activation.device), activation.buffer
        assert buffer is not None
        assert buffer.filled is not None
        compute = lane.streams.compute()
        tensor = torch.empty_strided(
            activation.shape, activation.stride, dtype=activation.dtype, device=activation.device
        )
        lane.back.wait(buffer.filled)
        self._wait_for_compute(lane.back, compute)
        lane.back.copy(tensor, activation.host())
        buffer.read = lane.back.record()
        self._counter.add("reloaded_bytes", activation.nbytes)
        return Held(tensor, buffer.read, compute)

    def _prefetch(self, activation: StoredActivation, forward: bool) -> None:
        """Start to bring back what is probably taken next."""
        room = self._settings.prefetch_bytes
        self._ahead = [ref for ref in self._ahead if (ahead := ref()) is not None and ahead.loading is not None]
        for ahead in chain(activation.companions(), activation.neighbours(forward)):  # not to its end: it is long
            if ahead.buffer is None or (room is not None and ahead.nbytes > room):
                return
            if ahead.loading is None:
                ahead.loading = self._load(ahead)
                self._ahead.append(weakref.ref(ahead))
            if room is not None:
                room -= ahead.nbytes
            elif not ahead.companion:
                return

    def _drop_ahead(self) -> None:
        for ref in self._ahead:
            ahead = ref()
            if ahead is not None and ahead.loading is not None:
                ahead.loading.release()
                ahead.loading = None
        self._ahead = []

    # -- both ----------------------------------------------------------------------------------------------------------

    def _lane(self, device: torch.device) -> _Lane:
        if device not in self._lanes:
            self._lanes[device] = _Lane(self._streams(device))
        return self._lanes[device]

    def _collect(self) -> None:
        while self._returned:
            self._buffers.give_back(self._returned.popleft())
        self._release_done()

    def _release_done(self) -> None:
        while self._sources and self._sources[0].ended:
            self._sources.popleft().release()


def dense(tensor: Tensor) -> Tensor:
    """Return ``tensor`` without gaps or overlaps in memory."""
    alike = tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return tensor if alike else tensor.clone()


def _memory(tensor: Tensor) -> tuple[object, ...] | None:
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None  # a wrapper without memory of its own, which asking for an address may fill
    place = tensor.data_ptr()
    return (place, tensor.shape, tensor.stride(), tensor.dtype) if place else None
