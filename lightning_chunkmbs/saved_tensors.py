"""Named tensors, sharded or whole, in checkpoints of both formats, beside those that Lightning keeps there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from .places import Place

SAVED_TENSORS = "saved_tensors"  # their key in a checkpoint, beside those of weights and optimizer states


def add_tensors(checkpoint: dict[str, Any], groups: Mapping[str, Mapping[str, Tensor]], *, full: bool) -> None:
    """Put groups of named tensors into a checkpoint that Lightning is about to save. All ranks must call this.

    Args:
        checkpoint: as in ``on_save_checkpoint``.
        groups: tensors of this rank, DTensors or equal on all ranks.
        full: whether the first rank saves whole tensors; else each rank saves its shards.
    """
    checkpoint[SAVED_TENSORS] = {group: portable(tensors, full=full) for group, tensors in groups.items()}


def portable(tensors: Mapping[str, Tensor], *, full: bool) -> dict[str, Tensor]:
    """Return what is saved for ``tensors``, on the host: DTensors, or on the first rank whole ones and nothing else."""
    if not full:
        return {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    saved = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
        if not dist.is_initialized() or dist.get_rank() == 0:
            saved[name] = whole.to("cpu", copy=True)
    return saved


@torch.no_grad()
def read_tensors(checkpoint: dict[str, Any], path: str | Path | None, groups: dict[str, dict[str, Tensor]]) -> None:
    """Copy saved tensors into those of ``groups``, whatever number of ranks saved them. All ranks must call this.

    Args:
        checkpoint: as in ``on_load_checkpoint``.
        path: where it was loaded from.
        groups: tensors to write to, under names that were saved.
    """
    place = None if path is None else Place(path).found()
    if place is not None and place.is_folder:
        dcp.load({SAVED_TENSORS: groups}, checkpoint_id=place.id)
        return
    for group, tensors in groups.items():
        if not tensors:
            continue  # which torch's function would refuse
        saved = checkpoint[SAVED_TENSORS][group]
        whole = {_attribute(name): saved[name] for name in tensors}
        set_model_state_dict(_Holder(tensors), whole, options=StateDictOptions(full_state_dict=True))


class _Holder(nn.Module):
    """Tensors as parameters of a module, for torch's functions that write whole values to shards of any placement."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(_attribute(name), nn.Parameter(tensor.detach(), requires_grad=False))


def _attribute(name: str) -> str:
    return name.replace(".", "/")  # a parameter's own name has no dot
