"""Classifies the 8 by 8 digits of scikit-learn, a row of the image at a time."""

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_chunkmbs import ChunkMBSMixin, ChunkMBSPlan


class Block(nn.Module):
    """Attention over the rows of the image, then a small MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, num_heads=4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class DigitClassifier(ChunkMBSMixin, LightningModule):
    chunkmbs_plan = ChunkMBSPlan(apply_modules=["blocks.{*}"], chunk_mbs=16)

    def __init__(self, width: int = 64, depth: int = 4, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Linear(8, width)
        self.position = nn.Parameter(torch.zeros(8, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        x = self.embedding(images) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, digits = batch
        loss = nn.functional.cross_entropy(self(images), digits)
        self.log("train_loss", loss)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, digits = batch
        self.accuracy(self(images), digits)
        self.log("test_accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams.learning_rate)
