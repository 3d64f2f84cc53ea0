"""Text files as rows of bytes."""

import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

__all__ = ["ByteText"]

SUFFIXES = {".py", ".txt", ".md"}


class ByteText(LightningDataModule):
    """Reads text into one long row of bytes and cuts it into windows of ``length``.

    Five contiguous hundredths of the text, spread evenly over it, are held out for validation. Training draws the
    other windows in an order that the seed and the epoch determine.

    Args:
        path: text files, or folders searched for ``*.py``, ``*.txt`` and ``*.md``. The default is the source of the
            running Python's standard library.
        length: bytes per sample.
        batch_size: samples per batch and process.
        val_windows: how many of the windows held out are used, taken evenly over all of them.
    """

    def __init__(
        self, path: list[str] | str | None = None, length: int = 128, batch_size: int = 8, val_windows: int = 128
    ) -> None:
        super().__init__()
        paths = [path] if isinstance(path, str) else path
        self.paths = [Path(p) for p in paths or [sysconfig.get_path("stdlib")]]
        self.length, self.batch_size, self.val_windows = length, batch_size, val_windows

    def setup(self, stage: str) -> None:
        self.train, held_out = split(windows(read(self.paths), self.length))
        self.val = held_out[:: max(1, len(held_out) // self.val_windows)][: self.val_windows]

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.val, self.batch_size)  # type: ignore[arg-type]


def text_files(path: Path) -> list[Path]:
    """``path`` itself, or the text files below it in a fixed order, installed packages left out."""
    if path.is_file():
        return [path]
    below = sorted(path.rglob("*")) if path.is_dir() else []
    return [p for p in below if p.suffix in SUFFIXES and "site-packages" not in p.relative_to(path).parts]


def read(paths: list[Path]) -> Tensor:
    """All bytes of all files, end to end."""
    text = b"".join(file.read_bytes() for path in paths for file in text_files(path))
    if not text:
        raise FileNotFoundError(
            f"No text found in {', '.join(map(str, paths))}. Give text files, or folders with "
            f"{', '.join(sorted(SUFFIXES))} files: --data.path=FOLDER"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def windows(text: Tensor, length: int) -> Tensor:
    """``[number of windows, length]``; a rest shorter than a window is dropped."""
    return text[: len(text) // length * length].view(-1, length)


def split(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Training windows, and the contiguous stretches held out."""
    hundredth = torch.arange(len(rows)) * 100 // max(1, len(rows))
    held_out = hundredth % 20 == 10
    if not held_out.any():
        raise ValueError(
            f"{len(rows)} windows of text are too few to hold some out: give more text or a shorter length."
        )
    return rows[~held_out], rows[held_out]
