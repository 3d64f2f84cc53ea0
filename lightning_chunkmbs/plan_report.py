"""A plan as a table and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from .planner import Hardware, Planned, Planner

__all__: list[str] = []


def report(planner: Planner, planned: Planned, hardware: Hardware) -> dict[str, Any]:
    """Return everything as plain numbers, bytes and seconds."""
    made = dataclasses.asdict(planned)
    made["bytes"]["peak"] = planned.bytes.peak
    made["time"] |= {"ratio": planned.time.ratio, "gain": planned.time.gain}
    made["micro_batch"] = planner.fake.batch_size
    made["micro_batches"] = planner.micro_batches * planner.passes
    made["hardware"] = dataclasses.asdict(hardware)
    made["optimizer"] = dataclasses.asdict(planner.optimizer)
    made["assumptions"] = assumptions(planner, hardware)
    return made


def table(planner: Planner, planned: Planned, hardware: Hardware) -> str:
    """Return a plan as lines of text."""
    b, t, width = planned.bytes, planned.time, 62
    kinds = planner.chunk_bytes(planned.chunk_mbs)
    rows: list[tuple[str, str]] = [
        ("parameters, sharded", size(b.parameters)),
        ("gradients, sharded", size(b.gradients)),
        (f"optimizer state ({planner.optimizer.name})", size(b.optimizer)),
        ("largest gathered block", size(b.block)),
        ("its gradients before reduction", size(b.block_gradients)),
        *((f"one chunk of {planned.chunk_mbs}: {kind}", size(nbytes)) for kind, nbytes in kinds.items()),
        ("hidden states in flight", size(b.in_flight)),
        *((f"peak: {moment}", size(nbytes)) for moment, nbytes in b.peaks.items()),
        ("peak", size(b.peak)),
        (f"usable, of {size(hardware.memory)}", size(hardware.usable)),
        ("on the host", size(b.host)),
    ]
    lines = [f"one rank of {hardware.devices}, chunk_mbs: {planned.chunk_mbs}", "-" * width]
    lines += [f"{name:<48}{value:>{width - 48}}" for name, value in rows]
    lines += ["-" * width, _verdict(planner, planned), ""]
    n = planned.stock_micro_batches
    lines += [
        f"optimizer step: {seconds(t.stock)} with stock accumulation of {n} micro-batches, {seconds(t.chunkmbs)} with "
        f"ChunkMBS ({100 * t.gain:+.1f} % samples a second)",
        f"of these {seconds(t.compute)} compute; the link is busy for {seconds(t.stock_communication)} and "
        f"{seconds(t.chunkmbs_communication)}",
        "",
        "assumed:",
    ]
    return "\n".join(lines + [f"- {line}" for line in assumptions(planner, hardware)])


def _verdict(planner: Planner, planned: Planned) -> str:
    fits = "fits" if planned.fits else "does not fit"
    if planned.largest is None:
        return f"{fits}; not even chunk_mbs: 1 does"
    whole = " (a whole micro-batch)" if planned.largest >= planner.fake.batch_size else ""
    return f"{fits}; the largest that does is chunk_mbs: {planned.largest}{whole}"


def assumptions(planner: Planner, hardware: Hardware) -> list[str]:
    """Return what the numbers rest on, one sentence each."""
    beside = "beside computation" if hardware.overlap else "after computation, but for our gathers ahead"
    lines = [
        f"{100 * hardware.headroom:.0f} % of the memory is left to allocator, kernels' scratch memory and libraries",
        "activations are those of the CPU's kernels: attention keeps no scores",
        f"{hardware.tflops:g}e12 operations a second, {hardware.link_gbps:g}e9 bits a second on a device's link, "
        f"{hardware.pcie_gbps:g}e9 to the host, {hardware.latency * 1e6:g} microseconds a collective",
        f"collectives {beside}; chunks and micro-batches compute at the same speed whatever their size",
        "stock accumulation recomputes the same blocks, has micro-batches as large as our chunks, and reduces in each",
        "the data bring batches as large as this one",
    ]
    return lines + planner.assumptions


def size(nbytes: float) -> str:
    """Write bytes in a unit that leaves one to four digits before the point."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def seconds(value: float) -> str:
    """Write seconds with three digits."""
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
