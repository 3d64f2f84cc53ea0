"""A model's weights from a Hugging Face folder of safetensors and back, each rank its own shards."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from transformers import PreTrainedModel

__all__ = ["load_weights", "save_weights"]


def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Fill a sharded model in place; every rank calls this and reads the rows it holds, in whatever dtype they are.

    Raises:
        KeyError: the folder lacks parameters of the model.
    """
    reader = HuggingFaceStorageReader(str(folder))
    there = reader.read_metadata().state_dict_metadata.keys()
    own = _once(model)
    missing = [name for name in own if name not in there]
    if missing:
        raise KeyError(
            f"{folder} has no {', '.join(missing[:5])} ({len(missing)} of {len(own)} tensors are not there)."
        )
    dcp.load(own, storage_reader=reader)


def save_weights(model: PreTrainedModel, folder: Path) -> None:
    """Write the model to a folder for ``from_pretrained``; every rank calls this and writes the rows it holds."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
    dcp.save(_once(model), storage_writer=writer)
    if not dist.is_initialized() or dist.get_rank() == 0:
        model.config.save_pretrained(folder)


@torch.no_grad()
def _once(model: PreTrainedModel) -> dict[str, Tensor]:
    """The state dict with a tied parameter under its first name only, as such folders have it."""
    names: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, name)
    tied = {n for n, p in model.named_parameters(remove_duplicate=False) if names[p] != n}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
