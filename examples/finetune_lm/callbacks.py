"""What the example prints: perplexity after every validation, and a summary when training ends."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["CommunicationTable", "SampleText", "Summary"]


class Summary(Callback):
    """Prints every validation perplexity, that before the first step included, and where the checkpoint is."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen.append(float(trainer.callback_metrics["val_perplexity"]))
        pl_module.print(f"validation perplexity after {trainer.global_step} steps: {self.seen[-1]:.2f}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        first, last = self.seen[0], self.seen[-1]
        pl_module.print(f"validation perplexity: {first:.1f} before, {last:.2f} after, {first / last:.1f} times lower")
        for checkpoint in filter(None, (saver.best_model_path for saver in trainer.checkpoint_callbacks)):
            pl_module.print(f"checkpoint: {checkpoint}")


class SampleText(Callback):
    """Prints what the model writes after ``prompt`` once it is trained.

    Every rank takes part: each of them holds only a part of the parameters.
    """

    def __init__(self, prompt: str = "import ", length: int = 200) -> None:
        self.prompt, self.length = prompt, length

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gathered: Callable[[], Any] = getattr(trainer.strategy, "gathered", nullcontext)
        pl_module.eval()
        with gathered():
            text = pl_module.continue_text(self.prompt, self.length)  # type: ignore[operator]
        pl_module.print(f"\n--- sample ---\n{text}\n--------------")


class CommunicationTable(Callback):
    """Prints the collectives of an optimizer step, as the strategy counted them, beside those of the stock strategy.

    The stock strategy gathers every block for forward and again for backward in each micro-batch, and reduces its
    gradients in each. That row is arithmetic, for the same samples in micro-batches as large as our chunks.
    """

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        report = getattr(trainer.strategy, "step_report", None)
        if report is not None:
            pl_module.print(communication_table(report))


def communication_table(report: Any) -> str:
    """The table of :class:`CommunicationTable` for one step report."""
    blocks = report.blocks
    stock = report.chunks // blocks  # micro-batches
    rows = [
        (f"one optimizer step, {blocks} blocks", "all-gathers", "reduce-scatters"),
        ("ChunkMBS, counted", report.all_gathers, report.reduce_scatters),
        (f"stock FSDP2, accumulating {stock}, computed", stock * (2 * blocks + 1), stock * (blocks + 1)),
    ]
    lines = [f"{name:<40}{gathers:>12}{scatters:>17}" for name, gathers, scatters in rows]
    offloaded = f"activations offloaded per rank in this step: {report.offloaded_bytes / 1e6:.1f} MB"
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], offloaded])
