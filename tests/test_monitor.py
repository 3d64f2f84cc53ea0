"""The monitor: rows of loggers, progress bar, table and warnings say what the strategy counted."""

from __future__ import annotations

import csv
import json
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_chunkmbs import ChunkMBSMonitor, monitor, profiling
from lightning_chunkmbs.counted import CountedGather
from lightning_chunkmbs.report import StepCounter
from lightning_chunkmbs.streams import DeviceStreams, HostStreams
from tests.models import BLOCKS, LENGTH, WIDTH, Loader, Stack, Trained, batches, chunked, fit, make_trainer
from tests.offloading import make_store, puts
from tests.ranks import raises_on_ranks, run_on_ranks

N, SAMPLES, STEPS = 4, 2, 3
HIDDEN = LENGTH * WIDTH * 4  # bytes of the hidden state of a sample


def padded_bytes(module: nn.Module) -> int:
    """What FSDP2 gathers for ``module`` on two ranks: rows are made even in number."""
    return sum(4 * (-(-p.shape[0] // 2) * 2) * p[0].numel() for p in module.parameters())


@contextmanager
def clock(seconds: float) -> Iterator[None]:
    """Let the monitor's clock go on by ``seconds`` whenever it is looked at."""
    now = 0.0

    def tick() -> float:
        nonlocal now
        now += seconds
        return now

    with patch.object(monitor, "time", SimpleNamespace(perf_counter=tick)):
        yield


def train(strategy: dict[str, Any], how: dict[str, Any], **trainer_options: Any) -> dict[str, Any]:
    """Train some windows with a monitor and return what it said."""
    own = ChunkMBSMonitor(**how)
    module = Trained(Stack())
    printed: list[str] = []
    module.print = lambda *args, **_: printed.append(str(args[0]))  # type: ignore[method-assign]
    options = {"accumulate_grad_batches": N, "log_every_n_steps": 1} | trainer_options
    data = batches([SAMPLES] * (options["accumulate_grad_batches"] * STEPS), seed=dist.get_rank())
    with (
        tempfile.TemporaryDirectory() as folder,
        clock(1.0 + dist.get_rank()),
        warnings.catch_warnings(record=True) as w,
    ):
        warnings.simplefilter("always")
        logger = CSVLogger(folder)
        trainer = fit(module, data, chunked(1, **strategy), callbacks=[own], logger=logger, **options)
        path = Path(logger.log_dir) / "metrics.csv"
        rows = list(csv.DictReader(path.open())) if path.exists() else []
    return {
        "rows": [{k.removeprefix("chunkmbs/"): v for k, v in row.items()} for row in rows],
        "bar": {name: float(value) for name, value in trainer.progress_bar_metrics.items()},
        "printed": printed,
        "warnings": [
            str(each.message)
            for each in w
            if "micro-batches gathered" in str(each.message) or "offloaded nothing" in str(each.message)
        ],
        "totals": own.totals,
        "bytes": (sum(padded_bytes(layer) for layer in module.net.layers), padded_bytes(module.net)),
    }


def expected_row(step: int, in_blocks: int, whole: int) -> dict[str, str]:
    chunks = BLOCKS * N * SAMPLES
    counts = {
        "step": step,
        "gathers": 2 * BLOCKS + 1,
        "scatters": BLOCKS + 1,
        "gathered_bytes": whole + in_blocks,  # blocks twice
        "reduced_bytes": whole,
        "blocks": BLOCKS,
        "calls": BLOCKS * N,
        "chunks": chunks,
        "offloaded_bytes": (chunks - 1) * HIDDEN,
        "reloaded_bytes": (chunks - 1) * HIDDEN,
        "host_bytes": (chunks - 1) * HIDDEN,
        "exposed_copy_seconds": 0.0,
    }
    return {name: str(value) for name, value in counts.items()}


def test_rows_have_the_counts_and_bytes_of_each_step_and_the_rate_of_all_ranks():
    first, second = run_on_ranks(2, train, {}, {})
    in_blocks, whole = first["bytes"]
    assert [int(row["step"]) for row in first["rows"]] == list(range(STEPS))
    for step, row in enumerate(first["rows"]):
        expected = expected_row(step, in_blocks, whole)
        assert {name: row[name] for name in expected} == expected
        assert float(row["exposed_gather_seconds"]) > 0
        assert float(row["samples_per_second"]) == 2 * N * SAMPLES / 2  # the slower rank took two seconds
        assert "peak_device_bytes" not in row  # a CPU counts none
    assert second["rows"] == []
    assert first["warnings"] == second["warnings"] == []


def test_bar_totals_and_table_say_the_same():
    first, _ = run_on_ranks(2, train, {}, {}, timeout=180)
    chunks = BLOCKS * N * SAMPLES
    assert first["bar"]["gathers"] == 2 * BLOCKS + 1
    assert first["bar"]["chunks"] == chunks
    assert first["bar"]["samples/s"] == 2 * N * SAMPLES / 2
    assert first["bar"]["offloaded_MB"] == pytest.approx((chunks - 1) * HIDDEN / 1e6)
    assert first["totals"]["gathers"] == STEPS * (2 * BLOCKS + 1)
    assert first["totals"]["host_bytes"] == (chunks - 1) * HIDDEN  # not added up
    [table] = first["printed"]
    lines = [line.split() for line in table.splitlines()]
    assert lines[0] == ["ChunkMBS,", str(STEPS), "optimizer", "steps", "a", "step", "in", "all"]
    assert ["gathers", str(2 * BLOCKS + 1), str(STEPS * (2 * BLOCKS + 1))] in lines
    assert ["chunks", str(chunks), str(STEPS * chunks)] in lines


def per_second(tokens: Any, log_every_n_steps: int) -> list[tuple[int, str]]:
    rows = train({}, {"tokens": tokens}, log_every_n_steps=log_every_n_steps)["rows"]
    return [(int(row["step"]), row["tokens_per_second"]) for row in rows]


def numel(batch: Tensor) -> int:
    return batch.numel()


def test_tokens_are_counted_over_all_steps_since_the_last_row():
    first, _ = run_on_ranks(2, per_second, numel, 2)
    tokens = 2 * (2 * N * SAMPLES * LENGTH)  # of two ranks in two steps
    assert first == [(1, str(tokens / 2))]


def test_each_micro_batch_gathering_by_itself_is_warned_of():
    first, second = run_on_ranks(2, train, {"chunkmbs_plan": {"max_lockstep": 1}}, {})
    [warning] = first["warnings"]
    assert f"A step of {N} micro-batches gathered {N * (2 * BLOCKS + 1)} times" in warning
    assert "max_lockstep: 1" in warning
    assert first["rows"][0]["gathers"] == str(N * (2 * BLOCKS + 1))
    assert second["warnings"] == []


def test_offload_that_moves_nothing_is_warned_of():
    plan = {"apply_modules": ["net.layers.{*}"], "min_bytes": 10 * HIDDEN}
    first, _ = run_on_ranks(2, train, {"activation_offload_plan": plan}, {})
    [warning] = first["warnings"]
    assert "offloaded nothing" in warning
    assert first["rows"][0]["offloaded_bytes"] == "0"


def test_without_offload_there_is_nothing_to_warn_of():
    first, _ = run_on_ranks(2, train, {"enable_activation_offload": False}, {})
    assert first["warnings"] == []
    assert first["rows"][0]["offloaded_bytes"] == "0"


def train_with_batches_of_text() -> None:
    trainer = make_trainer(chunked(), callbacks=[ChunkMBSMonitor(tokens="input_ids")])
    trainer.fit(Trained(Stack()), Loader(batches([1])))


def test_what_cannot_be_counted_is_an_error():
    for name, message in raises_on_ranks(1, train_with_batches_of_text):
        assert name == "ValueError"
        assert "tokens='input_ids'" in message


def test_another_strategy_is_refused():
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, callbacks=[ChunkMBSMonitor()]
    )
    with pytest.raises(TypeError, match="SingleDeviceStrategy.*ChunkMBSStrategy"):
        trainer.fit(Trained(Stack()), Loader(batches([1])))


class Twice(Trained):
    """Two optimizer steps in each batch."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        for part in batch.split(1):
            optimizer.zero_grad()
            self.manual_backward(self.net(part))
            optimizer.step()


def chunks_by_row() -> list[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        logger = CSVLogger(folder)
        options = {"logger": logger, "log_every_n_steps": 1, "callbacks": [ChunkMBSMonitor()]}
        fit(Twice(Stack()), batches([2] * 2), chunked(1), **options)
        rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()))
    return [(row["step"], row["chunkmbs/chunks"]) for row in rows]


def test_each_optimizer_step_of_a_batch_has_its_row():
    [rows] = run_on_ranks(1, chunks_by_row)
    assert rows == [(str(step), str(BLOCKS)) for step in range(4)]


# -- exposed waits ----------------------------------------------------------------------------------------------------


class Moment:
    """A mark at a set time; None: still to come."""

    def __init__(self, at: float | None) -> None:
        self.at = at

    def seconds_since(self, earlier: Moment) -> float | None:
        return None if self.at is None or earlier.at is None else self.at - earlier.at


class Clocked(HostStreams):
    """Streams whose marks are made at the given times."""

    def __init__(self, *times: float | None) -> None:
        self.moments = [Moment(at) for at in times]
        self._next = iter(self.moments)

    def compute(self) -> Any:
        return SimpleNamespace(
            mark=lambda: next(self._next), record=lambda: SimpleNamespace(done=lambda: False), wait=lambda event: None
        )


def test_a_wait_for_a_copy_counts_when_it_is_known():
    streams = Clocked(1.0, 1.5, 2.0, None)  # before and after each wait
    store = make_store(streams)
    store._lane(torch.device("cpu"))
    handles = puts(store, 2)
    [first, second] = handles
    second.load()
    assert store._counter.take().exposed_copy_seconds == 0.5
    first.load()
    assert store._counter.take().exposed_copy_seconds == 0.0
    streams.moments[3].at = 5.0
    assert store._counter.take().exposed_copy_seconds == 3.0


def test_on_the_host_no_copy_is_exposed():
    store = make_store()
    for handle in reversed(puts(store, 3, wait=True)):
        handle.load()
    report = store._counter.take()
    assert report.reloaded_bytes > 0
    assert report.exposed_copy_seconds == 0.0


def gathered(counter: StepCounter, *times: float | None) -> float:
    """Exposed seconds of a gather whose end and wait are at the given times."""
    streams = Clocked(*times)
    gather = CountedGather(lambda **_: None, counter, lambda device: streams)  # type: ignore[arg-type]
    gather(output_tensor=torch.empty(6, device="meta"), input_tensor=None)
    gather.waits()
    gather.waits()  # a second one has nothing to wait for
    return counter.take().exposed_gather_seconds


def test_a_gather_is_exposed_from_where_it_is_needed_to_its_end():
    counter = StepCounter()
    assert gathered(counter, 5.0, 3.0) == 2.0
    assert gathered(counter, 3.0, 5.0) == 0.0  # it had ended before
    with counter.paused():
        assert gathered(counter, 5.0, 3.0) == 0.0


def test_on_a_device_marks_are_events_that_take_the_time():
    made: list[dict[str, Any]] = []

    def event(**options: Any) -> Any:
        made.append(options)
        return SimpleNamespace(query=lambda: True, elapsed_time=lambda later: 250.0)  # milliseconds

    stream = SimpleNamespace(record_event=lambda event: event)
    module = SimpleNamespace(Event=event, current_stream=lambda device: stream)
    compute = DeviceStreams(module, torch.device("xpu", 0)).compute()
    start, end = compute.mark(), compute.mark()
    assert end.seconds_since(start) == 0.25
    assert made == [{"enable_timing": True}] * 2
    start.event.query = lambda: False
    assert end.seconds_since(start) is None


# -- profiler ---------------------------------------------------------------------------------------------------------


def trace_of_a_step() -> list[tuple[str, float]]:
    """Names and times of all ranges in the Chrome trace of a lockstep step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            fit(Trained(Stack()), batches([SAMPLES] * N), chunked(1), accumulate_grad_batches=N)
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sorted(((e["name"], e["ts"]) for e in events if e.get("ph") == "X"), key=lambda event: event[1])


def test_a_chrome_trace_shows_each_chunk_twice_and_each_gather():
    names = [name for name, _ in run_on_ranks(2, trace_of_a_step)[0]]
    n = N * SAMPLES
    ran = [name for name in names if name.startswith("ChunkMBS::block")]
    forward = [f"ChunkMBS::block (net.layers.{b}) chunk {i}/{n}" for b in range(BLOCKS) for i in range(n, 0, -1)]
    assert ran == forward + [f"{name}, recomputed" for name in reversed(forward)]
    assert sum(name.startswith("FSDP::all_gather (") or name == "FSDP::all_gather" for name in names) == 2 * BLOCKS + 1


def test_without_a_profiler_nothing_is_named():
    with patch.object(profiling, "record_function", side_effect=AssertionError):
        assert isinstance(profiling.chunk_range("block", 0, 1, again=False), nullcontext)
