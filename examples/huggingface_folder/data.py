"""Pairs of real text: what a function of the Python standard library says it does, and its code."""

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

__all__ = ["Docstrings"]

MODULES = "*.py"
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


class Docstrings(LightningDataModule):
    """Loads pairs (first sentence of a docstring, code without its docstring and name).

    Every tenth module is held out, whole.

    Args:
        batch_size: pairs per batch and process.
        train_pairs: pairs to train on at most.
        test_pairs: pairs held out at most.
    """

    def __init__(self, batch_size: int = 32, train_pairs: int = 2400, test_pairs: int = 400) -> None:
        super().__init__()
        self.batch_size, self.train_pairs, self.test_pairs = batch_size, train_pairs, test_pairs

    def setup(self, stage: str) -> None:
        if hasattr(self, "test"):  # set up again for each of fit and validate, and all of it takes seconds to read
            return
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in sorted(root.rglob(MODULES)) if not SKIPPED & set(f.relative_to(root).parts)]
        held_out = files[5::10]
        self.train = spread([p for f in files if f not in set(held_out) for p in pairs_in(f)], self.train_pairs)
        self.test = spread([p for f in held_out for p in pairs_in(f)], self.test_pairs)

    def train_dataloader(self) -> DataLoader[tuple[str, str]]:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[tuple[str, str]]:
        return DataLoader(self.test, len(self.test))  # type: ignore[arg-type]


def spread(pairs: list[tuple[str, str]], at_most: int) -> list[tuple[str, str]]:
    """At most so many pairs, taken evenly over all of them, each sentence once."""
    unique = list(dict(pairs).items())
    return unique[:: max(1, len(unique) // at_most)][:at_most]


def pairs_in(file: Path) -> Iterator[tuple[str, str]]:
    """Every documented function of a file."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and len(node.body) > 1:
            sentence = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            code = " ".join(" ".join(ast.unparse(statement) for statement in node.body[1:]).split())
            if len(sentence.split()) >= 4 and len(code) >= 40:
                yield sentence, code
