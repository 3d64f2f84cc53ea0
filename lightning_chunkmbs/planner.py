"""What a configuration needs: memory of a rank, and time of a step beside stock accumulation.

Nothing is allocated: the model is built on the meta device and measured on fake tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .coverage import Plans, brief, cut_rule, resolve
from .dtypes import Dtypes
from .fake_optimizer import OptimizerBytes, measure_optimizer
from .fake_step import FakeStep, run_fake_step
from .plans import FSDPPlan
from .step_bytes import BlockBytes, StepBytes, group_bytes
from .step_memory import StepMemory, most
from .step_time import BlockWork, StepTime, predict
from .trees import leaves

__all__ = ["Hardware", "Planned", "Planner"]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The devices that are planned for.

    Attributes:
        devices: how many there are.
        memory: bytes of one device.
        headroom: share of it that is left to the allocator, to kernels' scratch memory and to libraries.
        link_gbps: 10^9 bits that a device sends in a second in a collective.
        tflops: 10^12 operations that a device computes in a second in this model's blocks.
        pcie_gbps: 10^9 bits copied between device and host in a second, each way.
        overlap: collectives run beside computation.
        latency: seconds that a collective costs whatever its size.
    """

    devices: int
    memory: int
    headroom: float = 0.1
    link_gbps: float = 200.0
    tflops: float = 100.0
    pcie_gbps: float = 200.0
    overlap: bool = True
    latency: float = 2e-5

    @property
    def usable(self) -> int:
        """Bytes that a step may take."""
        return int(self.memory * (1 - self.headroom))


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One plan: a number of samples per chunk and what it needs.

    Attributes:
        chunk_mbs: samples per chunk.
        fits: whether the peak fits into the usable memory.
        largest: the most samples per chunk that fit, up to a whole micro-batch; None: not even one does.
        bytes: of a rank.
        time: of an optimizer step; stock accumulation runs chunks as micro-batches.
        stock_micro_batches: how many that are.
    """

    chunk_mbs: int
    fits: bool
    largest: int | None
    bytes: StepBytes
    time: StepTime
    stock_micro_batches: int


class Planner:
    """Measures a module once and plans for any number of samples per chunk.

    Args:
        module: the LightningModule; its parameters and buffers become fake tensors for good. Build it on the meta
            device.
        plans: what the strategy is given.
        batch: one micro-batch of a rank; shapes and dtypes count.
        step: runs a step on a batch and returns its loss; None: ``module.training_step``.
        around: what the module's own code runs in beside ``context``.
        ranks: over how many ranks groups are sharded.
        micro_batches: ``accumulate_grad_batches``.
        dtypes: dtypes of shards, gathered parameters and reduction.
        context: what steps run under (autocast).
        optimizers: makes the optimizers; None: AdamW is assumed.
        foreach: optimizers handle all parameters at once, as they do on accelerators.

    Raises:
        ValueError: the plans do not fit the module.
        RuntimeError: the step cannot be run without values.
    """

    def __init__(
        self,
        module: nn.Module,
        plans: Plans,
        batch: Any,
        *,
        step: Callable[[Any], Any] | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        ranks: int,
        micro_batches: int = 1,
        dtypes: Dtypes | None = None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        optimizers: Callable[[], Any] | None = None,
        foreach: bool = True,
    ) -> None:
        dtypes = dtypes or Dtypes()
        self._plans, self._names, self._ranks = plans, resolve(module, plans), ranks
        modules = dict(module.named_modules())
        blocks = {name: modules[name] for name in self._names.recompute}
        self._groups = {name: group_bytes(_own(block), ranks, dtypes) for name, block in blocks.items()}
        inside = {id(p) for block in blocks.values() for p in block.parameters()}
        kept = [p for p in module.parameters() if id(p) not in inside]
        self._kept = group_bytes(kept, ranks, dtypes)
        shards = {name: dtypes.shards or p.dtype for name, p in module.named_parameters()}
        automatic = getattr(module, "automatic_optimization", True)
        _check_plannable(module, needs_loss=step is None and not automatic)
        window = micro_batches
        self.micro_batches = min(window, (_side_by_side(plans) if automatic else 1) or window)
        self.passes = -(-window // self.micro_batches)
        # Those of the first pass, and of the second one, which adds to gradients that are there.
        self._in_passes = [self.micro_batches, min(self.micro_batches, window - self.micro_batches)][: self.passes]
        self.merged = (
            self.micro_batches
            if getattr(module, "merges_micro_batches", False) and step is None and window > 1
            else None
        )
        if self.merged is not None:
            with around():
                batch = module.merge_micro_batches([batch] * self.merged)  # type: ignore[operator]
            self.micro_batches, self._in_passes = 1, [1] * min(2, self.passes)
        self.fake: FakeStep = run_fake_step(
            module,
            partial(_run, around, step or partial(_training_step, module)),
            batch,
            blocks=blocks,
            chunked=self._names.chunk,
            rule=cut_rule(plans.chunkmbs_plan),
            dtypes=dtypes,
            context=context,
            save_ops=plans.recompute_plan.save_ops if plans.recompute_plan else (),
        )
        self.optimizer: OptimizerBytes = measure_optimizer(
            self.fake.mode, module, optimizers, ranks=ranks, shards=shards, foreach=foreach
        )
        self._batch = sum(leaf.nbytes for leaf in leaves(batch) if isinstance(leaf, Tensor))

    @property
    def assumptions(self) -> list[str]:
        """What the numbers rest on beside hardware and data, one sentence each."""
        fsdp, save = self._plans.fsdp_plan, self.fake.save
        idle = len(self._groups.keys() - {call.name for call in self.fake.calls})
        found = {
            f"no rank calls {idle} blocks of {len(self._groups)}, as this batch does not": idle,
            f"a window of {self.merged} micro-batches is merged into one": self.merged,
            "compiled blocks need what others need": fsdp is not None and fsdp.compile_blocks,
            "results that save_ops keeps are computed twice: a step takes less time": save.ops,
            f"kernels run none of save_ops' {', '.join(sorted(save.unused))}, which would keep more": save.unused,
            f"AdamW, since {self.optimizer.assumed}": self.optimizer.assumed is not None,
        }
        return [line for line, holds in found.items() if holds]

    def bytes(self, chunk_mbs: int) -> StepBytes:
        """Return what a rank needs with ``chunk_mbs`` samples per chunk."""
        return most([self._pass(chunk_mbs, n, later > 0).bytes() for later, n in enumerate(self._in_passes)])

    def _pass(self, chunk_mbs: int, micro_batches: int, accumulates: bool) -> StepMemory:
        offload = self._plans.activation_offload_plan
        fsdp = self._plans.fsdp_plan or FSDPPlan()
        limit = offload.host_memory_gb if offload else None
        called = {call.name for call in self.fake.calls}
        return StepMemory(
            blocks=list(self._blocks(chunk_mbs)),
            kept=self._kept,
            outside=self.fake.outside,
            batch=self._batch,
            micro_batches=micro_batches,
            optimizer=self.optimizer.state,
            optimizer_step=self.optimizer.step,
            idle_shards=sum(g.shards for name, g in self._groups.items() if name not in called),
            ahead=fsdp.forward_prefetch,
            reshards=fsdp.reshard_after_forward,
            accumulates=accumulates,
            streams=bool(offload and offload.stream_hidden_states),
            host_limit=None if limit is None else int(limit * 1e9),
            host_least=offload.min_bytes if offload else 0,
            ahead_bytes=offload.prefetch_bytes if offload else None,
            cpu_offload=fsdp.cpu_offload,
        )

    def _blocks(self, chunk_mbs: int) -> Iterator[BlockBytes]:
        for call in self.fake.calls:
            chunks = self.chunks(chunk_mbs) if self.fake.rule_for(call.name, chunk_mbs) else 1
            cost = self.fake.chunk_cost(call, chunk_mbs)
            yield BlockBytes(
                group=self._groups[call.name],
                entry=call.entry,
                exit=call.exit,
                chunks=chunks,
                chunk_entry=call.entry if call.fixed else cost.entry,
                chunk_exit=cost.exit,
                kept=cost.kept,
                forward=cost.forward,
                backward=cost.backward,
                offloaded=call.name in self._names.offload and not call.fixed,
                held=call.held,
                sides=call.sides,
                trained=call.trained,
            )

    def chunk_bytes(self, chunk_mbs: int) -> dict[str, int]:
        """Return the bytes that one chunk of each kind of block needs, by the name of the first block of the kind."""
        found: dict[int, tuple[str, int]] = {}
        for call in self.fake.calls:
            cost = self.fake.chunk_cost(call, chunk_mbs)
            found.setdefault(id(cost), (call.name, max(cost.forward, cost.backward)))
        return dict(found.values())

    def chunks(self, chunk_mbs: int) -> int:
        """Return into how many chunks a micro-batch is cut."""
        return -(-self.fake.batch_size // chunk_mbs)

    def largest(self, usable: int) -> int | None:
        """Return the most samples per chunk whose peak is at most ``usable`` bytes; None: not even one sample fits."""
        if self.bytes(1).peak > usable:
            return None
        low, high = 1, self.fake.batch_size
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes(middle).peak <= usable else (low, middle - 1)
        return low

    def time(self, chunk_mbs: int, hardware: Hardware) -> tuple[StepTime, int]:
        """Return the time of a step, and how many micro-batches of one chunk stock accumulates for it."""
        chunks = self.chunks(chunk_mbs)
        speed = hardware.tflops * 1e12
        works = []
        for call, block in zip(self.fake.calls, self._blocks(chunk_mbs), strict=True):
            flops = self.fake.chunk_cost(call, chunk_mbs).flops * block.chunks / chunks
            works.append(
                BlockWork(
                    forward_seconds=flops / speed,
                    gathered_bytes=block.group.buffer,
                    reduced_bytes=block.group.reduced,
                    offloaded_bytes=block.entry / chunks if block.offloaded else 0.0,
                )
            )
        stock = self.passes * self.micro_batches * chunks
        time = predict(
            works,
            micro_batches=stock,
            ranks=self._ranks,
            link_bytes_per_second=hardware.link_gbps * 1e9 / 8,
            kept_gathered_bytes=self._kept.buffer,
            kept_reduced_bytes=self._kept.reduced,
            outside_seconds=self.fake.outside.flops / speed / chunks,
            latency_seconds=hardware.latency,
            pcie_bytes_per_second=hardware.pcie_gbps * 1e9 / 8,
            passes=self.passes,
            overlap=hardware.overlap,
        )
        return time, stock

    def plan(self, hardware: Hardware, chunk_mbs: int | None = None) -> Planned:
        """Plan for ``chunk_mbs`` samples per chunk; None: the most that fit (one, if none does)."""
        largest = self.largest(hardware.usable)
        chosen = chunk_mbs or largest or 1
        needed = self.bytes(chosen)
        time, stock = self.time(chosen, hardware)
        return Planned(
            chunk_mbs=chosen,
            fits=needed.peak <= hardware.usable,
            largest=largest,
            bytes=needed,
            time=time,
            stock_micro_batches=stock,
        )


def _check_plannable(module: nn.Module, *, needs_loss: bool) -> None:
    if needs_loss:
        raise ValueError(
            f"A plan back-propagates what training_step returns, and with automatic_optimization = False "
            f"{type(module).__name__} does that itself. Give --batch example to take its example_input_array."
        )
    split = [name for name, p in module.named_parameters() if isinstance(p, DTensor)]
    if split:
        raise ValueError(
            f"A plan is made for whole parameters, and these are split by tensor parallelism: {brief(split)}. Plan for "
            f"the module as it is before, or write chunk_mbs as a number and measure a step."
        )


def _run(around: Callable[[], AbstractContextManager[Any]], step: Callable[[Any], Any], batch: Any) -> Any:
    with around():
        return step(batch)


def _training_step(module: Any, batch: Any) -> Any:
    """Call ``training_step``, which may leave out the number of the batch."""
    parameters = inspect.signature(module.training_step).parameters.values()
    numbered = len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return module.training_step(batch, 0) if numbered else module.training_step(batch)


def _side_by_side(plans: Plans) -> int | None:
    """How many micro-batches run side by side at most; None: all of a window."""
    if plans.chunkmbs_plan is None or not plans.enable_chunk_mbs:
        return 1
    return plans.chunkmbs_plan.max_lockstep


def _own(block: nn.Module) -> list[nn.Parameter]:
    return list(block.parameters())
