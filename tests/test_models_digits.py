"""A vision transformer learns the digits of scikit-learn with the plan of its yaml file, accumulated and cut."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from tests.model_zoo import build, strategy
from tests.models import Loader, make_trainer
from tests.one_window import Windowed
from tests.ranks import run_on_ranks

BATCH, N, EPOCHS = 48, 2, 8


def digits() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Images [n, 1, 8, 8] in random order, four fifths of them to train on."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(data.images, dtype=torch.float32)[order].unsqueeze(1) / 8 - 1
    labels = torch.tensor(data.target)[order]
    cut = len(order) * 4 // 5
    return (
        {"pixel_values": pixels[:cut], "labels": labels[:cut]},
        {"pixel_values": pixels[cut:], "labels": labels[cut:]},
    )


class Adam(Windowed):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def accuracy(net: nn.Module, held_out: dict[str, Tensor]) -> float:
    with torch.no_grad():
        predicted = net.eval()(pixel_values=held_out["pixel_values"]).logits.argmax(-1)
    return (predicted == held_out["labels"]).float().mean().item()


def learn() -> tuple[float, float, int]:
    train, held_out = digits()
    net = build("vit", num_channels=1, patch_size=2, hidden_size=32, intermediate_size=64, num_labels=10)
    size = len(train["labels"]) // (BATCH * N) * BATCH * N
    parts = [{k: v[i : i + BATCH] for k, v in train.items()} for i in range(0, size, BATCH)]
    module, before = Adam(net), accuracy(net, held_out)
    trainer = make_trainer(strategy("vit", chunk_mbs=16), max_epochs=EPOCHS, accumulate_grad_batches=N)
    net.train()
    trainer.fit(module, Loader(parts))
    with trainer.strategy.gathered():
        return before, accuracy(net, held_out), module.report.chunks


def test_digits_are_learnt() -> None:
    [(before, after, chunks)] = run_on_ranks(1, learn)
    assert chunks == 2 * N * BATCH // 16
    assert before < 0.3
    assert after > 0.9
    print(f"accuracy {before:.3f} -> {after:.3f}")
