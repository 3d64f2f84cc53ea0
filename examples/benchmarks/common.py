"""What the benchmarks share: a model, times taken side by side, and results as JSON, picture and table."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BLOCKS = "net.blocks.{*}"
START, END = "<!-- results, written by the command above -->", "<!-- end of results -->"


# -- the model --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A pre-norm transformer layer with heads of 64."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Network(nn.Module):
    """Embedding, blocks, head: logits of all tokens, or of each sample's last one."""

    def __init__(self, hidden: int, blocks: int, vocabulary: int = 256, last_token: bool = False) -> None:
        super().__init__()
        self.last_token = last_token
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(blocks))
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor, recompute: bool = False) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return self.head(x[:, -1:].clone() if self.last_token else x)

    def loss(self, tokens: Tensor, **how: bool) -> Tensor:
        """Return the mean loss of a batch (0-dim); tokens are ``[samples, tokens]``."""
        targets = tokens[:, -1:] if self.last_token else tokens
        return nn.functional.cross_entropy(self(tokens, **how).flatten(0, 1), targets.flatten())


# -- times ------------------------------------------------------------------------------------------------------------


def rounds(minutes: float, most: int) -> Iterator[int]:
    """Yield 0 for a round that warms up, then 1 to ``most`` while ``minutes`` last; all ranks get the same."""
    start = time.perf_counter()
    for i in range(most + 1):
        go_on = torch.tensor(i < 2 or time.perf_counter() - start < 60 * minutes)
        if dist.is_initialized():
            dist.broadcast(go_on, 0)
        if not go_on:
            return
        yield i


def side_by_side(
    runs: Mapping[str, Callable[[], Sequence[float]]], minutes: float, most: int
) -> dict[str, list[float]]:
    """Run all in turns, so that load on the machine meets all of them, and return each one's times (seconds)."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in rounds(minutes, most):
        for name, run in runs.items():
            taken = run()
            times[name] += taken if i else []
    return times


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Return the median of the ratios of times that were taken one after the other."""
    return statistics.median(t / b for t, b in zip(times, base, strict=True))


# -- results ----------------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Return what the figures depend on, without the machine's name."""
    return {
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def write(
    out: Path, settings: Mapping[str, Any], results: Mapping[str, Any], tables: str, draw: Callable[[Any], None]
) -> None:
    """Write ``results.json``, ``results.png`` and the results in ``README.md`` of a folder; only the first rank does.

    Args:
        out: the folder.
        settings: the command's options.
        results: numbers, by name.
        tables: Markdown.
        draw: draws into matplotlib's pyplot.
    """
    if dist.is_initialized() and dist.get_rank():
        return
    out.mkdir(parents=True, exist_ok=True)
    plain = {name: value for name, value in settings.items() if isinstance(value, (int, float, str, list))}
    content = {"environment": environment(), "settings": plain, "results": results}
    (out / "results.json").write_text(json.dumps(content, indent=2) + "\n")
    _plot(out / "results.png", draw)
    said = ", ".join(f"{name} {value}" for name, value in (environment() | plain).items())
    _put_into_readme(out / "README.md", f"{tables}\n\n![the same as a picture](results.png)\n\nMeasured with: {said}.")
    print(tables, flush=True)


def _plot(path: Path, draw: Callable[[Any], None]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.figure(figsize=(8, 4.5))
    draw(pyplot)
    pyplot.tight_layout()
    pyplot.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close()


def _put_into_readme(path: Path, text: str) -> None:
    results = f"{START}\n\n{text}\n\n{END}"
    before = path.read_text() if path.exists() else results
    path.write_text(re.sub(f"{START}.*{END}", lambda _: results, before, flags=re.DOTALL).rstrip() + "\n")
