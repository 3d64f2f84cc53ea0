"""Callbacks of Lightning's that copy or average a whole model are refused before a run begins."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn


def check_callbacks(trainer: Any) -> None:
    """Refuse callbacks that cannot work with sharded weights; before their ``setup``, which copies the module.

    Raises:
        TypeError: a callback averages weights by copies of the whole model.
    """
    if trainer.state.fn != TrainerFn.FITTING:
        return
    for callback in trainer.callbacks:
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise TypeError(_refusal(callback))


def _refusal(callback: Any) -> str:
    kind = type(callback).__name__
    mean = "decay=None" if isinstance(callback, StochasticWeightAveraging) else "decay=0.999"
    also = (
        " decay=None is the mean of all updates; give its schedule of learning rates to configure_optimizers."
        if isinstance(callback, StochasticWeightAveraging)
        else " decay=None is the mean of all updates."
    )
    return (
        f"{kind} averages a copy of the whole model, and here each rank has shards. Put "
        f"lightning_chunkmbs.ShardedWeightAveraging({mean}) into Trainer(callbacks=[...]) in its place.{also}"
    )
