"""A text encoder from a Hugging Face folder, trained to find the code that a sentence describes."""

from pathlib import Path

import torch
import torch.nn.functional as F
from folder import load_weights, save_weights
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoTokenizer

__all__ = ["TextEncoder"]


class TextEncoder(LightningModule):
    """Embeds texts by the mean of their hidden states; learns with in-batch negatives.

    Args:
        folder: a Hugging Face folder: config.json, tokenizer.json and safetensors.
        result: where the trained model is saved, as such a folder.
        length: tokens of a text at most.
        learning_rate: of AdamW.
    """

    def __init__(self, folder: Path, result: Path, length: int = 32, learning_rate: float = 1e-4) -> None:
        super().__init__()
        self.folder, self.result, self.length, self.learning_rate = folder, result, length, learning_rate
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.encoder: torch.nn.Module | None = None

    def configure_model(self) -> None:
        if self.encoder is None:  # called for fit and again for validate
            with torch.device("meta"):
                self.encoder = AutoModel.from_config(AutoConfig.from_pretrained(self.folder), add_pooling_layer=False)

    def on_fit_start(self) -> None:
        load_weights(self.encoder, self.folder)  # each rank reads its shards

    def on_train_end(self) -> None:
        save_weights(self.encoder, self.result)
        if self.trainer.is_global_zero:
            self.tokenizer.save_pretrained(self.result)

    def embed(self, texts: list[str]) -> Tensor:
        tokens = self.tokenizer(texts, padding=True, truncation=True, max_length=self.length, return_tensors="pt")
        tokens = tokens.to(self.device)
        hidden = self.encoder(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1)
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    def similarities(self, pairs: tuple[list[str], list[str]]) -> Tensor:
        """Of every sentence (rows) with every code; one forward pass for both, so that blocks are called once."""
        sentences, codes = self.embed([*pairs[0], *pairs[1]]).chunk(2)
        return sentences @ codes.T

    def training_step(self, pairs: tuple[list[str], list[str]], batch_idx: int) -> Tensor:
        return contrast(self.similarities(pairs))

    def validation_step(self, pairs: tuple[list[str], list[str]], batch_idx: int) -> None:
        similarities = self.similarities(pairs)
        found = similarities.argmax(1) == torch.arange(len(similarities), device=self.device)
        values = {"recall": found.float().mean(), "val_loss": contrast(similarities)}
        self.log_dict(values, sync_dist=True, batch_size=len(found))

    def on_validation_epoch_end(self) -> None:
        recall, loss = (float(self.trainer.callback_metrics[name]) for name in ("recall", "val_loss"))
        steps = self.trainer.global_step
        self.print(
            f"held out, after {steps} steps: right code found for {recall:.3f} of the sentences, loss {loss:.3f}"
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.learning_rate)


def contrast(similarities: Tensor) -> Tensor:
    """The loss by which each sentence finds its code among those of the batch, and each code its sentence."""
    scores, own = similarities * 20, torch.arange(len(similarities), device=similarities.device)
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
