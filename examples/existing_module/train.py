"""Trains the digit classifier on two processes and prints its accuracy on digits it has not seen.

``python examples/existing_module/train.py`` starts both processes itself; under ``torchrun`` it uses those it is given.
"""

import argparse

import torch
from classifier import DigitClassifier
from lightning.pytorch import Trainer, seed_everything
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split


def digits() -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 8, 8) / 16, torch.tensor(labels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()

    seed_everything(1)
    train, test = random_split(digits(), [1437, 360])
    trainer = Trainer(
        strategy="chunkmbs",
        accelerator="cpu",
        devices=2,
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = DigitClassifier()
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True, drop_last=True))
    trainer.test(model, DataLoader(test, batch_size=36), verbose=False)
    if trainer.is_global_zero:
        print(f"test accuracy: {float(trainer.callback_metrics['test_accuracy']):.3f}")


if __name__ == "__main__":
    main()
