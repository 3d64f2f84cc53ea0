"""ShardedWeightAveraging: running averages of sharded weights, shown in validation and kept in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from .meshes import local_part
from .saved_tensors import SAVED_TENSORS, add_tensors, portable, read_tensors
from .strategy import ChunkMBSStrategy


class ShardedWeightAveraging(Callback):
    """Averages the weights over optimizer steps, each rank its own shards, without any communication.

    Averaged are parameters that are trained and, with ``use_buffers``, floating buffers that checkpoints hold; the
    averages are in float32 at least, whatever the shards are in. They cost each rank one more copy of these shards, and
    during validation two. The first update copies the weights. Until it validation sees the weights as they are.

    During validation the model has the averages, and from the end of training on too. A checkpoint's ``state_dict``
    has them as well, so that ``test(ckpt_path=...)`` and ``load_from_checkpoint`` give what was validated; the weights
    that training goes on with are beside it, and ``fit(ckpt_path=...)`` goes on as if it had not been interrupted. A
    checkpoint written after training can be resumed until the Trainer's next run begins.

    Args:
        decay: weight of the old average in each update, between 0 and 1; None: all updates count the same.
        update_every_n_steps: optimizer steps from one update to the next.
        update_starting_at_step: zero-based index of the optimizer step before which there is no update.
        use_buffers: average buffers too; else validation sees them as they are.

    Raises:
        ValueError: an argument is out of range.
        TypeError: (when a run begins) another strategy is used.
        ValueError: (when a run begins) another callback of this class, or of one derived from it, averages too.
    """

    def __init__(
        self,
        decay: float | None = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int = 0,
        use_buffers: bool = True,
    ) -> None:
        if decay is not None and not 0 <= decay <= 1:
            raise ValueError(f"decay is a number between 0 and 1, or None for a mean of all; {decay!r} was given.")
        if update_every_n_steps < 1 or update_starting_at_step < 0:
            raise ValueError(
                f"update_every_n_steps is at least 1 and update_starting_at_step at least 0; {update_every_n_steps} "
                f"and {update_starting_at_step} were given."
            )
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.use_buffers = use_buffers
        self._forget()

    def _forget(self) -> None:
        self._updates = 0
        self._steps = 0  # optimizer steps that were looked at
        self._averages: dict[str, Tensor] = {}
        self._trained: dict[str, Tensor] | None = None  # values that the model has no more while it has the averages

    def should_update(self, step_idx: int) -> bool:
        """Return whether to update after the optimizer step of this zero-based index; may be overridden."""
        return step_idx >= self.update_starting_at_step and step_idx % self.update_every_n_steps == 0

    # -- averaging -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse other strategies and a second average, and start anew."""
        if not isinstance(trainer.strategy, ChunkMBSStrategy):
            raise TypeError(
                f"ShardedWeightAveraging averages the shards of ChunkMBSStrategy, and the Trainer has "
                f"{type(trainer.strategy).__name__}. Use lightning.pytorch.callbacks.EMAWeightAveraging there."
            )
        averaging = [type(c).__name__ for c in trainer.callbacks if isinstance(c, ShardedWeightAveraging)]  # type: ignore[attr-defined]
        if len(averaging) > 1:
            raise ValueError(
                f"A model shows one average in validation and checkpoints, and the Trainer has {len(averaging)} "
                f"callbacks that average: {', '.join(averaging)}. Keep one of them in Trainer(callbacks=[...])."
            )
        self._forget()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the steps of earlier runs, after which there is nothing to update."""
        self._steps = max(self._steps, trainer.global_step)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin averages of what was unfrozen before its first step."""
        if self._averages:
            self._begin({n: v for n, v in self._values(pl_module).items() if n not in self._averages})

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the averages when an optimizer step was made."""
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            if self.should_update(step_idx=trainer.global_step - 1):
                self._update(self._values(pl_module))

    def _values(self, module: pl.LightningModule) -> dict[str, Tensor]:
        """Tensors of the module that are averaged, by name; they share its memory."""
        values: dict[str, Tensor] = {
            name: p for name, p in module.named_parameters() if p.requires_grad or name in self._averages
        }
        if self.use_buffers:
            saved = module.state_dict().keys()
            values |= {name: b for name, b in module.named_buffers() if name in saved}
        return {name: v.detach() for name, v in values.items() if v.is_floating_point() or v.is_complex()}

    def _begin(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._averages[name] = value.to(torch.promote_types(value.dtype, torch.float32), copy=True)

    @torch.no_grad()
    def _update(self, values: Mapping[str, Tensor]) -> None:
        weight = 1 / (self._updates + 1) if self.decay is None else 1 - self.decay
        known = {name for name, average in self._averages.items() if values[name].shape == average.shape}
        for name in known:
            average = local_part(self._averages[name])
            average.lerp_(local_part(values[name]).to(average.dtype), weight)
        self._begin({name: value for name, value in values.items() if name not in known})
        self._updates += 1

    # -- showing the averages ------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the model the averages."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._show(pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the model back the values that are trained."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._hide(pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the averages in the model."""
        self._show(pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give the model back the values that are trained."""
        self._hide(pl_module)

    @torch.no_grad()
    def _show(self, module: pl.LightningModule) -> None:
        if not self._averages or self._trained is not None:
            return
        values = {name: value for name, value in self._values(module).items() if name in self._averages}
        self._trained = {name: value.clone() for name, value in values.items()}
        for name, value in values.items():
            local_part(value).copy_(local_part(self._averages[name]))

    @torch.no_grad()
    def _hide(self, module: pl.LightningModule) -> None:
        trained, self._trained = self._trained, None
        values = self._values(module) if trained else {}
        for name, value in (trained or {}).items():
            local_part(values[name]).copy_(local_part(value))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides tensors."""
        return {"updates": self._updates, "steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._updates, self._steps = state_dict["updates"], state_dict["steps"]

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Put the averages into ``state_dict``, and beside it what is needed to go on."""
        if not self._averages:
            return
        full = not trainer.strategy._save_distributed_checkpoint  # type: ignore[attr-defined]
        values = self._values(pl_module)
        trained = self._trained or {name: values[name] for name in self._averages}
        wider = {name: a for name, a in self._averages.items() if a.dtype != trained[name].dtype}
        shown = {name: average.to(trained[name].dtype) for name, average in self._averages.items()}
        checkpoint["state_dict"] |= _under_all_names(pl_module, portable(shown, full=full))
        add_tensors(checkpoint, {"trained": trained, "averages": wider}, full=full)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take the averages out of the loaded model and give it the values that are trained."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._forget()
        names = checkpoint.get(SAVED_TENSORS)
        if names is None:
            rank_zero_warn("The checkpoint has no averages of ShardedWeightAveraging; they begin at its next update.")
            return
        self._averages = dict.fromkeys(names["trained"], torch.empty(0))  # for what is frozen by now
        values = self._values(pl_module)
        self._averages = {}
        self._begin({name: values[name] for name in names["trained"]})
        wider = {name: self._averages[name] for name in names["averages"]}
        trained = {name: values[name] for name in names["trained"]}
        read_tensors(checkpoint, trainer.ckpt_path, {"trained": trained, "averages": wider})


def _under_all_names(module: pl.LightningModule, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the further names of tensors that are tied: loading writes to a tensor once for each of its names."""
    firsts: dict[int, str] = {}
    found = dict(tensors)
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            first = firsts.setdefault(id(tensor), name)
            if first in tensors:
                found[name] = tensors[first]
    return found
