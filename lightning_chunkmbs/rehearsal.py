"""A LightningModule run beside its run: its Trainer answers, logs and metrics take nothing, no rank communicates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torchmetrics import Metric

from .trees import map_tree
from .unknown_values import Answers

__all__: list[str] = []


class _Onlooker:
    """Stands for the Trainer. A schedule's length, which only a run knows, does not change what memory it takes."""

    estimated_stepping_batches = 1000
    num_training_batches = 1000

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.logger = DummyLogger()
        self.loggers = [self.logger]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


@contextmanager
def rehearsed(module: pl.LightningModule, trainer: Any, ranks: int) -> Iterator[None]:
    """Context in which a module's own code runs without an effect on the Trainer.

    Args:
        module: a module that belongs to no Trainer.
        trainer: what the module is told of its Trainer is taken from here.
        ranks: of how many ranks ``all_gather`` returns tensors.
    """

    def all_gather(data: Any, *_: Any, **__: Any) -> Any:
        return map_tree(lambda x, _: torch.stack([x] * ranks) if isinstance(x, Tensor) else x, data)

    with ExitStack() as undo, Answers():
        undo.enter_context(_shadowed(module, log=_nothing, all_gather=all_gather, _trainer=_Onlooker(trainer)))
        for metric in (m for m in module.modules() if isinstance(m, Metric)):
            # They look at values (are there NaNs, how many classes?) and refuse those that are not possible.
            undo.enter_context(_shadowed(metric, update=_nothing, forward=_zero, compute=_zero))
        yield


@contextmanager
def _shadowed(module: nn.Module, **stand_ins: Any) -> Iterator[None]:
    """Context in which other attributes hide those of a module."""
    before = {name: module.__dict__[name] for name in stand_ins if name in module.__dict__}
    module.__dict__.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del module.__dict__[name]
        module.__dict__.update(before)


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for a method that returns nothing."""


def _zero(*_: Any, **__: Any) -> Tensor:
    return torch.zeros(())


def configured_optimizers(module: pl.LightningModule, trainer: Any, ranks: int) -> Any:
    """Return what ``configure_optimizers`` returns."""
    with rehearsed(module, trainer, ranks):
        return module.configure_optimizers()
