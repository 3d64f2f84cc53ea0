"""A strategy belongs to one Trainer: another Trainer, and Fabric, are refused where they ask for its accelerator.

[Note: where a second Trainer shows]
A Trainer reads ``_accelerator`` of a strategy that it is given before anything else, to see what the strategy brings
along; the Trainer that it belongs to reads ``accelerator`` only. Fabric refuses what is no strategy of its own with an
error that does not know of Trainers. So our class is registered as one, and ``_precision``, which Fabric alone reads,
raises.

Touches these two private names. Were they renamed, Lightning's own errors would be back.
"""

from __future__ import annotations

from typing import Any, NoReturn

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import Strategy as FabricStrategy
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import ModelParallelStrategy


class OneTrainer(ModelParallelStrategy):
    """Refuses to be given to a second Trainer or to Fabric."""

    _own_accelerator: Accelerator | None = None

    @property
    def accelerator(self) -> Accelerator | None:
        """The accelerator of the Trainer that the strategy belongs to; None before there is one."""
        return self._own_accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator | None) -> None:
        self._own_accelerator = accelerator

    @property
    def _accelerator(self) -> None:
        """What a Trainer asks for before it takes the strategy (see [Note: where a second Trainer shows])."""
        if self._own_accelerator is not None:
            raise RuntimeError(
                f"A strategy belongs to the Trainer that it was given to first, and this {type(self).__name__} was "
                f"given to another one. Make one for each: Trainer(strategy={type(self).__name__}(...)). For fit, "
                f"validate, test and predict one after the other, use the same Trainer."
            )

    @_accelerator.setter
    def _accelerator(self, accelerator: Accelerator | None) -> None:
        self._own_accelerator = accelerator

    @property
    def _precision(self) -> Any:
        """What Fabric asks for, and a Trainer does not."""
        refuse_fabric()


def refuse_fabric() -> NoReturn:
    """Refuse Fabric.

    Raises:
        TypeError: always.
    """
    raise TypeError(
        "ChunkMBSStrategy runs a LightningModule's steps under a Trainer, and was given to Fabric, which has no steps. "
        "Write lightning.pytorch.Trainer(strategy=ChunkMBSStrategy(...)) and put the loop's body into training_step."
    )


FabricStrategy.register(OneTrainer)
STRATEGY_REGISTRY.register("chunkmbs", refuse_fabric, description="For lightning.pytorch.Trainer only")
