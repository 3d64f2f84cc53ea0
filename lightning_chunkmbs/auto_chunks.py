"""``chunk_mbs: auto`` in training: as many samples per chunk as the planner finds to fit on every device.

[Note: when it is decided]
A plan needs the shapes of a micro-batch, and a module that is not sharded yet. So a copy without memory is made before
sharding; when the first micro-batch of a run arrives, it is rehearsed on a copy of that copy. By then a device holds
what it will hold in any case, and of what others have taken of its memory nothing is left to guess. Before the first
training step, and in a run that only evaluates, blocks take one sample at a time.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import FSDPModule

from .agree import make_agree
from .apply import AppliedModel
from .coverage import Plans
from .meshes import Meshes, local_part, ranks_of
from .plan_report import size
from .planner import Hardware, Planner
from .precision import ChunkMBSPrecision
from .rehearsal import configured_optimizers, rehearsed
from .trees import leaves
from .twins import bring_up_to_date, twin_of

__all__: list[str] = []

_AUTO = "_chunkmbs_auto"
_NUMBER = (
    "`python -m lightning_chunkmbs plan --config FILE --devices N --device_memory 80GiB` says how many samples fit; "
    "write that number, or chunk_mbs: 1."
)


class AutoChunks:
    """Decides how many samples a chunk has, from a module that is not sharded yet."""

    def __init__(self, module: pl.LightningModule, plans: Plans, meshes: Meshes, device: torch.device) -> None:
        self._plans, self._meshes, self._device = plans, meshes, device
        self._twin = twin_of(module, [module._trainer, module._fabric, module._device_mesh])
        for inner in self._twin.modules():
            if isinstance(getattr(inner, "_device", None), torch.device):
                inner.__dict__["_device"] = torch.device("cpu")  # where it is planned, whatever the device

    @classmethod
    def prepare(cls, module: pl.LightningModule, plans: Plans, meshes: Meshes, device: torch.device) -> None:
        """Before ``module`` is sharded: keep what is needed if its plans leave ``chunk_mbs`` open.

        Raises:
            ValueError: nobody can say how much memory there is, or the module cannot be planned for.
        """
        plan = plans.chunkmbs_plan
        if plans.enable_chunk_mbs and plan is not None and plan.chunk_mbs == "auto":
            _refuse(module, plans, meshes, device)
            module.__dict__[_AUTO] = cls(module, plans, meshes, device)

    @staticmethod
    def of(module: pl.LightningModule) -> AutoChunks | None:
        """Return what :meth:`prepare` made for a module; None: its plans have a number."""
        return module.__dict__.get(_AUTO)

    def decide(self, trainer: Any, model: AppliedModel, batch: Any) -> int:
        """In the first training step of a run: return the most samples per chunk that fit on every rank.

        All ranks must call this.

        Args:
            trainer: the Trainer.
            model: the sharded module.
            batch: its first micro-batch on this rank.

        Raises:
            RuntimeError: the step cannot be run without values, on some rank; raised on every rank.
        """
        planner, usable, chunk_mbs, error = None, 0, -1, None
        try:
            usable = _usable(self._device, _expected(trainer, batch, self._device))
            planner = self._planner(trainer, model, batch)
            chunk_mbs = planner.largest(usable) or 0
        except Exception as raised:
            error = raised
        agree = make_agree(ranks_of(self._meshes.data), self._meshes.timeout)
        [least] = agree([chunk_mbs])
        if planner is None or least < 0:
            raise RuntimeError(_failed(error)) from error
        _tell(planner, least, usable)
        mode, planner = planner.fake.mode, None
        [sound] = agree([int(not _left_behind(mode))])
        if not sound:
            raise RuntimeError(
                f"chunk_mbs: auto runs training_step on tensors without values, and some of these were kept where the "
                f"run would use them: in a cache of a function (lru_cache), in a global, a callback or the datamodule. "
                f"Keep such tensors on the module. {_NUMBER}"
            )
        return max(1, least)

    def _planner(self, trainer: Any, model: AppliedModel, batch: Any) -> Planner:
        twin, ranks, shard = twin_of(self._twin, []), self._meshes.data.size(), self._meshes.shard
        bring_up_to_date(twin, trainer.lightning_module)
        with torch.enable_grad(), isolate_rng():
            return Planner(
                twin,
                self._plans,
                move_data_to_device(batch, torch.device("cpu")),
                around=partial(rehearsed, twin, trainer, ranks),
                ranks=shard.size(shard.ndim - 1),
                micro_batches=_most_micro_batches(trainer),
                dtypes=model.dtypes,
                context=ChunkMBSPrecision(trainer.precision_plugin.precision, "cpu").forward_context,
                optimizers=partial(configured_optimizers, twin, trainer, ranks),
                foreach=self._device.type != "cpu",
            )


def _left_behind(mode: FakeTensorMode) -> bool:
    """Whether tensors of a plan are still alive after it."""
    gc.collect()
    return any(type(one) is FakeTensor and one.fake_mode is mode for one in gc.get_objects())


def _failed(error: Exception | None) -> str:
    cause = "on another rank, whose error says why" if error is None else f"with {type(error).__name__}: {error}"
    return f"chunk_mbs: auto runs training_step on tensors without values, and this failed {cause}. {_NUMBER}"


def _tell(planner: Planner, chunk_mbs: int, usable: int) -> None:
    """Log what was decided; 0: not even one sample fits."""
    needed = planner.bytes(max(1, chunk_mbs))
    beside = f"{size(needed.peak)} is the predicted peak, and {size(usable)} of the device can be used"
    if chunk_mbs:
        rank_zero_info(
            f"ChunkMBS: chunk_mbs: auto takes {chunk_mbs} of {planner.fake.batch_size} samples per chunk: {beside}."
        )
    else:
        cure = _CURES[max(needed.peaks, key=needed.peaks.__getitem__)]
        rank_zero_warn(f"chunk_mbs: auto tries one sample per chunk, which is not expected to fit: {beside}. {cure}")


_CURES = {
    "forward": "Shard over more devices, or set stream_hidden_states in activation_offload_plan.",
    "outside": "Its peak is the code after the last block: take smaller micro-batches, or a loss without logits.",
    "backward": "Shard over more devices, or set stream_hidden_states in activation_offload_plan.",
    "reduce": "Shard over more devices, or name large layers outside blocks in fsdp_plan.",
    "optimizer": "Shard over more devices, or set cpu_offload in fsdp_plan.",
}


def _refuse(module: pl.LightningModule, plans: Plans, meshes: Meshes, device: torch.device) -> None:
    reason = None
    if not hasattr(torch.get_device_module(device), "mem_get_info"):
        reason = f"asks a device for its free memory, and {device.type} tells none"
    elif not module.automatic_optimization:
        reason = "plans a training_step that returns its loss, and automatic_optimization is False"
    elif meshes.tensor.size() > 1:
        reason = "plans for layers that each rank has whole, and tensor_parallel_size is above 1"
    elif plans.chunkmbs_plan and plans.chunkmbs_plan.packed_kwarg_names:
        reason = "plans from shapes alone, and packed_kwarg_names cut by lengths"
    elif any(isinstance(m, FSDPModule) for m in module.modules()):
        reason = "plans for modules that the strategy shards, and configure_model calls fully_shard itself"
    if reason is not None:
        raise ValueError(f"chunk_mbs: auto {reason}. {_NUMBER}")


def _most_micro_batches(trainer: Any) -> int:
    schedulers = [c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)]
    return max([trainer.accumulate_grad_batches, *(n for s in schedulers for n in s.scheduling.values())])


def _usable(device: torch.device, expected: int) -> int:
    """Return the bytes of a device for what a plan counts, of which ``expected`` are there now."""
    on = torch.get_device_module(device)
    free, total = on.mem_get_info(device)
    # A process may have been given a part of its device.
    part = getattr(on, "get_per_process_memory_fraction", lambda _: 1.0)(device) * total
    others = max(0, on.memory_allocated(device) - expected)  # a second model, averaged weights: they stay
    return int(min(free + on.memory_reserved(device), part) - Hardware.headroom * part - others)


def _expected(trainer: Any, batch: Any, device: torch.device) -> int:
    """Return the bytes on a device of what a plan counts: parameters, the optimizers' state and a micro-batch."""
    state = [value for o in trainer.optimizers for values in o.state.values() for value in values.values()]
    there = [*trainer.lightning_module.parameters(), *state, *leaves(batch)]
    local = [local_part(value) for value in there if isinstance(value, Tensor)]
    return sum(part.nbytes for part in local if part.device == device)
