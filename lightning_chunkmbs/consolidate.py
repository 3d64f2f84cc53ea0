"""One file from a checkpoint: ``python -m lightning_chunkmbs.consolidate CHECKPOINT FILE [--weights-of model]``."""

from __future__ import annotations

import argparse
import os
import re
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from .places import Place

__all__ = ["consolidate"]


def consolidate(
    checkpoint: str | os.PathLike[str],
    file: str | os.PathLike[str],
    weights_of: str | None = None,
    weights_only: bool = True,
) -> None:
    """Write one file with what a checkpoint has, in one process without a Trainer.

    Args:
        checkpoint: the path or URL of a checkpoint of either format.
        file: the file to write. What ends with ``.safetensors`` needs ``weights_of``.
        weights_of: None for a checkpoint with everything, which Trainer and ``load_from_checkpoint`` take. Otherwise
            the name of a submodule of the LightningModule, ``"model"`` say, whose ``state_dict`` alone is written, for
            its own ``load_state_dict`` or a Hugging Face folder; ``""`` for the LightningModule's.
        weights_only: as in ``torch.load``; False runs code that the checkpoint may contain.

    Raises:
        ValueError: there is no checkpoint, no such submodule in it, or the file exists.
    """
    target, place = Path(file), Place(checkpoint).found()
    if place is None:
        raise ValueError(f"There is no checkpoint at {checkpoint}.")
    if target.exists():
        raise ValueError(f"{target} exists. Remove it or choose another name.")
    if target.suffix == ".safetensors" and weights_of is None:
        raise ValueError("A safetensors file has weights only: say whose, as in `--weights-of model`.")
    if weights_of is None:
        contents = _everything(place, weights_only)
    else:
        contents = _weights(place, weights_only, f"{weights_of}." if weights_of else "")
    target.parent.mkdir(parents=True, exist_ok=True)
    _write(contents, target)


def _everything(place: Place, weights_only: bool) -> dict[str, Any]:
    if not place.is_folder:
        return place.load(weights_only)
    contents = _load(place, lambda path: True)
    keys = sorted((key for key in contents if re.fullmatch(r"optimizer_\d+", key)), key=lambda key: int(key[10:]))
    states = [{"state": {}, **contents.pop(key)} for key in keys]
    return {**contents, **({"optimizer_states": states} if states else {}), **place.meta.load(weights_only)}


def _weights(place: Place, weights_only: bool, prefix: str) -> dict[str, Any]:
    if place.is_folder:
        loaded = _load(place, lambda path: path[0] == "state_dict" and str(path[1]).startswith(prefix))
    else:
        loaded = place.load(weights_only)
    weights: dict[str, Any] = loaded.get("state_dict", {})
    found = {name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}
    if not found:
        raise ValueError(f"The checkpoint has no weights of {prefix[:-1]!r}, which should name a submodule.")
    return found


def _load(place: Place, wanted: Callable[[tuple[Any, ...]], bool]) -> dict[str, Any]:
    planner = _Wanted(wanted)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as asked for
        dcp.load({}, checkpoint_id=place.id, planner=planner, no_dist=True)
    return planner.nested()


class _Wanted(DefaultLoadPlanner):
    """Loads, whole, whatever of a checkpoint is wanted, rather than what a given state dict has."""

    def __init__(self, wanted: Callable[[tuple[Any, ...]], bool]) -> None:
        super().__init__()
        self._wanted = wanted
        self._values: dict[str, Any] = {}
        self._paths: dict[str, tuple[Any, ...]] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if metadata is None:
            raise ValueError("The checkpoint has no metadata.")
        self._paths = {key: path for key, path in (metadata.planner_data or {}).items() if self._wanted(path)}
        for key in self._paths:
            stored = metadata.state_dict_metadata[key]
            self._values[key] = None
            if isinstance(stored, TensorStorageMetadata):
                self._values[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
        super().set_up_planner(self._values, metadata, is_coordinator)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        # What is no tensor, such as a learning rate, was written by torch.distributed.checkpoint itself.
        self._values[read_item.dest_index.fqn] = torch.load(value, weights_only=False)

    def nested(self) -> dict[str, Any]:
        root: dict[str, Any] = {}
        # Names keep their order, the module's; the parts of lists come in theirs.
        for key, path in sorted(self._paths.items(), key=lambda item: [p for p in item[1] if isinstance(p, int)]):
            inner: Any = root
            for part, following in pairwise(path):
                empty: Any = [] if isinstance(following, int) else {}
                inner = _entered(inner, part, empty)
            _entered(inner, path[-1], self._values[key])
        return root


def _entered(container: Any, part: Any, value: Any) -> Any:
    """Return what ``container`` has under ``part``, after putting ``value`` there if it has nothing."""
    if isinstance(container, dict):
        return container.setdefault(part, value)
    if part == len(container):
        container.append(value)
    return container[part]


def _write(contents: dict[str, Any], target: Path) -> None:
    if target.suffix != ".safetensors":
        torch.save(contents, target)
        return
    from safetensors.torch import save_file

    tensors = {name: value.contiguous().clone() for name, value in contents.items() if isinstance(value, Tensor)}
    save_file(tensors, target, metadata={"format": "pt"})


def _main() -> None:
    parser = argparse.ArgumentParser("python -m lightning_chunkmbs.consolidate", description=__doc__)
    parser.add_argument("checkpoint", help="path or URL of a checkpoint of either format")
    parser.add_argument("file", help="file to write")
    parser.add_argument("--weights-of", help="write the weights of this submodule only")
    parser.add_argument("--no-weights-only", dest="weights_only", action="store_false", help="see torch.load")
    consolidate(**vars(parser.parse_args()))


if __name__ == "__main__":
    _main()
