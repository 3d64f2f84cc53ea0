"""What is refused before a run and, when it has been set up, before its first step."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.distributed.tensor import DTensor


def refuse_windows(trainer: Any, module: pl.LightningModule) -> None:
    """Refuse before training what cannot be run in windows.

    Raises:
        TypeError: the ``training_step`` takes an iterator, or an optimizer calls it again.
    """
    schedulers = [c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)]
    if trainer.accumulate_grad_batches == 1 and not any(s.going_to_accumulate_grad_batches() for s in schedulers):
        return
    cure = "Write enable_chunk_mbs: false for ordinary accumulation."
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise TypeError(
            f"training_step(dataloader_iter) draws its batches itself; windows need training_step(batch). {cure}"
        )
    if any(isinstance(getattr(o, "_optimizer", o), torch.optim.LBFGS) for o in trainer.optimizers):
        raise TypeError(f"LBFGS runs its closure several times in a step; a window runs once. {cure}")


def check_parameters(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer], whole: Container[str]) -> None:
    """Refuse parameters that were made after sharding, and optimizers of those that it replaced.

    Args:
        module: the LightningModule.
        optimizers: its optimizers.
        whole: names of the parameters that sharding left whole.

    Raises:
        RuntimeError: nothing would synchronise, or nothing would train, some of them.
    """
    late = [n for n, p in module.named_parameters() if not isinstance(p, DTensor) and n not in whole]
    if late:
        raise RuntimeError(
            f"The module was sharded after configure_model, and {len(late)} parameters were made or replaced later: "
            f"{', '.join(late[:4])}. Nothing would synchronise them between ranks. Make them in __init__ or "
            f"configure_model."
        )
    own = set(module.parameters())
    foreign = [p for o in optimizers for group in o.param_groups for p in group["params"] if p not in own]
    if foreign:
        raise RuntimeError(
            f"An optimizer trains the parameters that the module has now, and one of this run holds {len(foreign)} "
            f"others (the first of shape {tuple(foreign[0].shape)}): sharding has replaced those of before. Build it "
            f"in configure_optimizers, for example return torch.optim.AdamW(self.parameters())."
        )


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
