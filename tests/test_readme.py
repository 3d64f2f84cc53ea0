"""What the README shows is run: its yaml parses, its code runs, its commands exist and work."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_chunkmbs import ChunkMBSStrategy

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """Return the README's code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    """Return the README's shell commands without their comments."""
    lines = [line.split(" #")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line]


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class MyModule(LightningModule):
    """The module that the README's snippets extend."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Stack()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_yaml_makes_the_strategy() -> None:
    (text,) = blocks("yaml")
    config = yaml.safe_load(text)
    assert config["class_path"] == "lightning_chunkmbs.ChunkMBSStrategy"
    assert isinstance(ChunkMBSStrategy(**config["init_args"]), ChunkMBSStrategy)


def test_the_python_code_makes_a_trainer_for_the_module() -> None:
    (code,) = blocks("python")
    names: dict[str, object] = {
        "MyModule": MyModule,
        "Trainer": lambda **options: Trainer(accelerator="cpu", **options),
    }
    exec(code, names)
    trainer = names["trainer"]
    assert isinstance(trainer, Trainer)
    assert isinstance(trainer.strategy, ChunkMBSStrategy)
    assert trainer.accumulate_grad_batches == 8
    assert names["MyChunkedModule"]().chunkmbs_plan.chunk_mbs == 2  # type: ignore[operator]


def test_the_added_lines_of_the_diff_run() -> None:
    (diff,) = blocks("diff")
    added = "\n".join(line[1:] for line in diff.splitlines() if line.startswith("+"))
    names: dict[str, object] = {"Trainer": lambda **options: Trainer(accelerator="cpu", **options)}
    exec(added, names)
    assert isinstance(names["trainer"].strategy, ChunkMBSStrategy)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make ")])
def test_a_make_target_exists_and_names_existing_files(command: str) -> None:
    plan = subprocess.run([*shlex.split(command), "-n"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert plan.returncode == 0, plan.stderr
    for path in re.findall(r"\b(?:configs|examples)/[\w/.]+", plan.stdout):
        assert (ROOT / path).exists(), path


def test_every_other_command_is_run_by_a_test() -> None:
    """`test_examples.py` runs the examples, both ways of starting them; the rest is run below."""
    known = {
        "pip install .",
        "python examples/existing_module/train.py",
        "torchrun --nproc_per_node 2 examples/existing_module/train.py",
        "python -m lightning_chunkmbs fit --config configs/quickstart_cpu.yaml --data.path=lightning_chunkmbs",
    }
    others = {command for command in commands() if not command.startswith("make ")}
    assert others == known
    examples = (ROOT / "tests" / "test_examples.py").read_text()
    assert "examples/existing_module/train.py" in examples
    assert "torch.distributed.run" in examples


def test_the_command_with_own_text_parses() -> None:
    (command,) = [c for c in commands() if "--data.path" in c]
    words = shlex.split(command)
    run = subprocess.run(
        [sys.executable, *words[1:], "--print_config"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert "lightning_chunkmbs" in str(yaml.safe_load(run.stdout)["data"])


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
