"""What FSDP2 gathers and what blocks compute, in order, on a network and a device that take a set time.

Times are counted, not measured: a gather takes :data:`GATHER` from where it is issued, or from where the one before it
ends; a block's computation takes :data:`COMPUTE` for each chunk; waiting for a gather takes what is left of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

GATHER, COMPUTE = 2.0, 1.0


@dataclass
class Timeline:
    """Events of the last step in order: gather, wait, run and recompute, each with the name of a module."""

    events: list[tuple[str, str]] = field(default_factory=list)
    clock: float = 0.0
    waits: list[tuple[str, float]] = field(default_factory=list)  # for which module, and how long
    _free: float = 0.0  # when the network is
    _ends: dict[str, float] = field(default_factory=dict)

    def gather(self, name: str) -> None:
        if name == "root":  # a new step; only the last is kept
            self.events.clear()
            self.waits.clear()
        self.events.append(("gather", name))
        self._free = self._ends[name] = max(self._free, self.clock) + GATHER

    def wait(self, name: str) -> None:
        self.events.append(("wait", name))
        left = max(0.0, self._ends[name] - self.clock)
        self.waits.append((name, left))
        self.clock += left

    def compute(self, name: str) -> None:
        kind = "run" if torch._C._current_graph_task_id() == -1 else "recompute"
        if self.events[-1] != (kind, name):
            self.events.append((kind, name))
        self.clock += COMPUTE

    @property
    def unused(self) -> list[str]:
        """Modules that were gathered and never waited for."""
        names = [name for kind, name in self.events if kind == "gather"]
        return [n for n in names if names.count(n) != self.events.count(("wait", n))]


@contextmanager
def recorded(net: nn.Module, blocks: type[nn.Module]) -> Iterator[Timeline]:
    """Record what is gathered for modules of ``net``, and what its ``blocks`` compute."""
    timeline = Timeline()
    names = {id(module): name for name, module in net.named_modules()}
    unshard, wait = FSDPParamGroup.unshard, FSDPParamGroup.wait_for_unshard

    def noting_unshard(self: FSDPParamGroup, *args: Any, **kwargs: Any) -> None:
        before = self._all_gather_result
        unshard(self, *args, **kwargs)
        if self._all_gather_result is not before:
            timeline.gather(names.get(id(self.modules[0]), "root"))

    def noting_wait(self: FSDPParamGroup) -> None:
        if self._all_gather_result is not None:
            timeline.wait(names.get(id(self.modules[0]), "root"))
        wait(self)

    with (
        patch.object(FSDPParamGroup, "unshard", noting_unshard),
        patch.object(FSDPParamGroup, "wait_for_unshard", noting_wait),
        _computing(timeline, net, blocks),
    ):
        yield timeline


@contextmanager
def _computing(timeline: Timeline, net: nn.Module, blocks: type[nn.Module]) -> Iterator[None]:
    names, forward = {id(module): name for name, module in net.named_modules()}, blocks.forward

    def noting_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        timeline.compute(names[id(self)])
        return forward(self, *args, **kwargs)

    with patch.object(blocks, "forward", noting_forward):
        yield


class _Delayed(dist.Work):
    """An all-gather under way: its output has no values before it is waited for."""

    def __init__(self, timeline: Timeline, name: str, output: Tensor, work: dist.Work, received: Tensor) -> None:
        super().__init__()
        self._waiting = [(timeline, name, output, work, received)]

    def wait(self, *_: Any) -> bool:
        while self._waiting:
            timeline, name, output, work, received = self._waiting.pop()
            timeline.wait(name)
            work.wait()
            output.copy_(received)
        return True


@contextmanager
def delayed(net: nn.Module, blocks: type[nn.Module]) -> Iterator[Timeline]:
    """As :func:`recorded`, on a process group whose all-gathers take their time, and return at once where asked to.

    Which group is gathered is told by what it sends, for torch.distributed knows no modules.
    """
    timeline = Timeline()
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    original = getattr(dist, name)

    def gather(output: Tensor, sent: Tensor, group: Any, async_op: bool) -> dist.Work | None:
        timeline.gather(group_name := _sender(net, sent))
        received, sent = torch.empty_like(output), sent.clone()  # which may be a part of the output
        output.fill_(torch.nan)
        work = _Delayed(timeline, group_name, output, original(received, sent, group=group, async_op=True), received)
        if async_op:
            return work
        work.wait()
        return None

    def by_name(*args: Any, **kwargs: Any) -> dist.Work | None:
        tensors = [*args, *(kwargs[k] for k in ("output_tensor", "input_tensor") if k in kwargs)]
        return gather(*tensors, kwargs["group"], kwargs["async_op"])

    with patch.object(dist, name, by_name), _computing(timeline, net, blocks):
        yield timeline


def _sender(net: nn.Module, sent: Tensor) -> str:
    """Return the name of the module whose shards are ``sent``; all that is not in a group of ``net`` is the root's."""
    for name, module in net.named_modules():
        if isinstance(module, FSDPModule):
            shards = [p.to_local() for p in module.parameters() if isinstance(p, DTensor)]
            sums = torch.stack([s.double().square().sum() for s in shards]).sum() if shards else torch.zeros(())
            if torch.isclose(sums.double(), sent.double().square().sum(), rtol=1e-9):
                return name
    return "root"
