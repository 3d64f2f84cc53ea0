"""ChunkMBSMixin: plans declared on a LightningModule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .plans import ActivationOffloadPlan, ChunkMBSPlan, RecomputePlan


class ChunkMBSMixin:
    """Declares on a LightningModule which of its blocks can be chunked, recomputed and offloaded.

    Put it before the class that it extends. Plans given to the strategy win over these. With any other strategy the
    module behaves as without the mixin.

    Example::

        class MyModule(ChunkMBSMixin, MyOldModule):
            chunkmbs_plan = ChunkMBSPlan(apply_modules=["model.layers.{*}"], chunk_mbs=2)

        Trainer(strategy="chunkmbs").fit(MyModule())

    Attributes:
        chunkmbs_plan: blocks whose batch is cut, and how; a plan or a dict of its fields.
        recompute_plan: blocks that are recomputed; None covers what ``chunkmbs_plan`` covers.
        activation_offload_plan: blocks whose entry activations are offloaded; None covers the same.
    """

    chunkmbs_plan: ChunkMBSPlan | Mapping[str, Any] | None = None
    recompute_plan: RecomputePlan | Mapping[str, Any] | None = None
    activation_offload_plan: ActivationOffloadPlan | Mapping[str, Any] | None = None

    def merge_micro_batches(self, batches: list[Any]) -> Any:
        """Override to run one forward over a whole window: return one batch made of those of its micro-batches.

        With ``accumulate_grad_batches=N`` the module then gets one ``training_step`` for each window, with the merged
        batch, and ``chunk_mbs`` cuts it inside the blocks. The loss is scaled by ``len(batches) / N``. A loss that is a
        mean over tokens becomes the mean over all tokens of the window, where accumulation takes the mean of the
        micro-batches' means; in-batch negatives come from the whole window.
        """
        raise TypeError(f"{type(self).__name__} does not override merge_micro_batches.")

    @property
    def merges_micro_batches(self) -> bool:
        """Whether :meth:`merge_micro_batches` is overridden."""
        return type(self).merge_micro_batches is not ChunkMBSMixin.merge_micro_batches

    def configure_model(self) -> None:
        """Run the module's own ``configure_model`` and apply the plans, when the Trainer's strategy does that."""
        super().configure_model()  # type: ignore[misc]
        apply = getattr(_strategy_of(self), "apply", None)
        if apply is not None:
            apply(self)


def _strategy_of(module: Any) -> Any:
    try:
        return module.trainer.strategy
    except RuntimeError:  # configure_model called by hand, without a Trainer
        return None
