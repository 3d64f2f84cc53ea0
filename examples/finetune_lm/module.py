"""A causal language model as a plain LightningModule: nothing in it knows of chunks, gathers or offload."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics.text import Perplexity
from transformers import Qwen3Config, Qwen3ForCausalLM, get_cosine_schedule_with_warmup

__all__ = ["CausalLM"]


class CausalLM(LightningModule):
    """Qwen3 over bytes, built from its configuration and trained with the loss Hugging Face computes.

    Args:
        layers: number of decoder layers.
        hidden_size: width of the hidden states.
        intermediate_size: width inside the MLPs.
        heads: attention heads; half as many for keys and values.
        learning_rate: the highest rate, reached after the warm-up.
        warmup_steps: optimizer steps until then; a cosine brings the rate down to zero afterwards.
    """

    def __init__(
        self,
        layers: int = 4,
        hidden_size: int = 320,
        intermediate_size: int = 1024,
        heads: int = 4,
        learning_rate: float = 2e-3,
        warmup_steps: int = 10,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = Qwen3Config(
            vocab_size=256,  # a token is a byte
            num_hidden_layers=layers,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=hidden_size // heads,
            max_position_embeddings=1024,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,  # in training; generate asks for one
        )
        self.model = Qwen3ForCausalLM(config)
        self.perplexity = Perplexity()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        tokens = batch.long()
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        tokens = batch.long()
        logits = self.model(input_ids=tokens).logits
        self.perplexity(logits[:, :-1], tokens[:, 1:])
        self.log("val_perplexity", self.perplexity, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(
            self.parameters(), self.hparams.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = get_cosine_schedule_with_warmup(optimizer, self.hparams.warmup_steps, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.no_grad()
    def continue_text(self, prompt: str, length: int) -> str:
        """Sample ``length`` bytes after ``prompt``."""
        tokens = torch.tensor([list(prompt.encode())], device=self.device)
        mask = torch.ones_like(tokens)
        written = self.model.generate(
            tokens, max_new_tokens=length, do_sample=True, attention_mask=mask, use_cache=True
        )
        return bytes(written[0].tolist()).decode(errors="replace")
