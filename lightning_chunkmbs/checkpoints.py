"""How the strategy writes, reads and removes checkpoints, in the formats of the stock strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from .checkpoint_states import load_sharded, load_whole
from .places import Place
from .saved_tensors import SAVED_TENSORS


class CheckpointingStrategy(ModelParallelStrategy):
    """The stock strategy with checkpoints that survive what happens while they are written.

    The formats are the stock ones. Beyond what the stock strategy does: a new checkpoint takes the place of another
    only when complete; fsspec URLs; optimizers and parameters without state; names are compared in both formats.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Write a checkpoint to a path or fsspec URL that all ranks reach; all ranks must call this.

        Raises:
            TypeError: ``storage_options`` were given.
            RuntimeError: on every rank, when the first could not write.
        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} takes no storage_options: configure fsspec for the URL instead.")
        place = Place(self.broadcast(filepath))
        if self._save_distributed_checkpoint:
            self._save_sharded(checkpoint, place)
        else:
            self._on_first_rank(lambda: self._save_whole(checkpoint, place))

    def _save_sharded(self, checkpoint: dict[str, Any], place: Place) -> None:
        states = {"state_dict": checkpoint.pop("state_dict")}
        optimizer_states = checkpoint.pop("optimizer_states", [])
        states |= {f"optimizer_{index}": state for index, state in enumerate(optimizer_states)}
        if added := checkpoint.get(SAVED_TENSORS):  # their names stay
            states[SAVED_TENSORS] = added
            checkpoint[SAVED_TENSORS] = {group: dict.fromkeys(tensors) for group, tensors in added.items()}
        self._on_first_rank(lambda: place.prepare(folder=True))
        dcp.save(states, checkpoint_id=place.target.id)

        def complete() -> None:
            with place.target.meta.open("wb") as file:
                torch.save(checkpoint, file)
            place.complete()

        self._on_first_rank(complete)

    def _save_whole(self, checkpoint: dict[str, Any], place: Place) -> None:
        if isinstance(self.checkpoint_io, TorchCheckpointIO):
            place.prepare(folder=False)
            self.checkpoint_io.save_checkpoint(checkpoint, str(place.target.id))
            place.complete()
        else:  # a plugin may write later, or elsewhere
            if place.is_folder:
                place.remove()
            self.checkpoint_io.save_checkpoint(checkpoint, place.id)

    def _on_first_rank(self, work: Callable[[], None]) -> None:
        """Do on the first rank what fails on all ranks if it fails."""
        error = None
        if self.is_global_zero:
            try:
                work()
            except Exception as raised:
                error = raised
        if message := self.broadcast(None if error is None else f"{type(error).__name__}: {error}"):
            raise RuntimeError(f"The checkpoint could not be written. {message}") from error

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the module and, when fitting, the optimizers; all ranks must call this.

        Returns:
            Everything else of the checkpoint.

        Raises:
            FileNotFoundError: there is no checkpoint.
            RuntimeError, KeyError: it does not fit the module or the optimizers.
        """
        place = self._found(checkpoint_path)
        module = self.lightning_module
        if module is None:
            raise RuntimeError("A checkpoint is loaded into the LightningModule that the Trainer was given.")
        optimizers = self.optimizers if module.trainer.state.fn == TrainerFn.FITTING else []
        if place.is_folder:
            load_sharded(place, module, optimizers, module.strict_loading)
            return place.meta.load(weights_only)
        checkpoint = place.load(weights_only)
        load_whole(checkpoint, module, optimizers, module.strict_loading)
        return checkpoint

    def _found(self, path: _PATH) -> Place:
        asked = Place(self.broadcast(path))
        found = asked.found() if self.is_global_zero else None
        place = self.broadcast(None if found is None else found.id)
        if place is None:
            raise FileNotFoundError(
                f"There is no checkpoint at {asked.id}: neither a file nor a folder with {asked.meta.id}."
            )
        if place != asked.id:
            rank_zero_warn(f"Writing {asked.id} was interrupted; the checkpoint before it is loaded from {place}.")
        return Place(place)

    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Remove a checkpoint; a link without what it points to."""
        if isinstance(self.checkpoint_io, TorchCheckpointIO):
            if self.is_global_zero:
                Place(filepath).remove()
        else:
            super().remove_checkpoint(filepath)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state for a checkpoint, and leave it as it is."""
        with _gradient_shown(getattr(optimizer, "_optimizer", optimizer)):
            return super().optimizer_state(optimizer)


@contextmanager
def _gradient_shown(optimizer: Optimizer) -> Iterator[None]:
    """Show a gradient to torch, which fills the state of an optimizer that has neither by a step that counts."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if optimizer.state or not parameters or any(p.grad is not None for p in parameters):
        yield
        return
    parameters[0].grad = torch.zeros_like(parameters[0])
    try:
        yield
    finally:
        parameters[0].grad = None
