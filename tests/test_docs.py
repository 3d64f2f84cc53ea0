"""The pages in docs: the generated one is up to date, what the others show parses, what they cite and link is there."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from torch import nn

import lightning_chunkmbs
from lightning_chunkmbs import ChunkMBSStrategy
from lightning_chunkmbs.cli import Parser
from lightning_chunkmbs.plan_command import main as plan
from tests.documented import INIT_ARGS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.zh-CN.md"])
STRATEGY = "lightning_chunkmbs.ChunkMBSStrategy"


def blocks(language: str) -> list[Any]:
    """The code blocks of a language on all pages, each with where it is."""
    found = [(page.name, text) for page in PAGES for text in code_of(page.read_text(encoding="utf-8"), language)]
    return [pytest.param(text, id=f"{name}-{i}") for i, (name, text) in enumerate(found)]


def code_of(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_configuration_is_what_the_docstrings_say():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.PAGE.read_text(encoding="utf-8") == generate.page(), "run: python docs/generate.py"
    assert set(generate.PARTS) == set(lightning_chunkmbs.__all__)


# -- what the pages show ----------------------------------------------------------------------------------------------


class MyModule(LightningModule):
    """The module that the snippets extend and train."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 4))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def names(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)

    def cpu_trainer(**options):
        return Trainer(**{**options, "accelerator": "cpu", "devices": 1, "num_nodes": 1, "logger": False})

    return {"MyModule": MyModule, "LightningModule": LightningModule, "Trainer": cpu_trainer, "torch": torch, "nn": nn}


def whole_config(snippet: dict[str, Any]) -> dict[str, Any]:
    """What the CLI would be given: a snippet is a part of it, down to the strategy's arguments."""
    if "trainer" in snippet or "seed_everything" in snippet:
        return snippet
    if "class_path" in snippet:
        return {"trainer": {"strategy": snippet}}
    return {"trainer": {"strategy": {"class_path": STRATEGY, "init_args": snippet}}}


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_parses_as_the_command_line_parses_it(text):
    parser = Parser()
    parser.add_lightning_class_args(Trainer, "trainer")
    config = whole_config(yaml.safe_load(text))
    parsed = parser.parse_object(config)
    assert parsed.trainer.strategy.class_path == STRATEGY
    given = config["trainer"]["strategy"].get("init_args", {})
    assert given.items() or "plan" not in text
    assert isinstance(ChunkMBSStrategy(**given), ChunkMBSStrategy)


@pytest.mark.parametrize("text", blocks("python"))
def test_python_runs(text, names):
    exec(compile(text, "<page>", "exec"), names)
    if "trainer = " in text:
        assert isinstance(names["trainer"].strategy, ChunkMBSStrategy)


@pytest.mark.parametrize("text", blocks("diff"))
def test_what_a_diff_makes_runs(text, names):
    lines = text.splitlines()
    assert any(line.startswith("-") for line in lines)
    after = textwrap.dedent("\n".join(line[1:] for line in lines if line[:1] in (" ", "+")))
    exec(compile(after, "<page>", "exec"), names)
    assert any(isinstance(getattr(value, "strategy", None), ChunkMBSStrategy) for value in names.values())
    before = "\n".join(line[1:] for line in lines if line[:1] in (" ", "-"))
    compile(textwrap.dedent(before), "<page>", "exec")


def commands() -> Iterator[str]:
    for page in PAGES:
        for block in code_of(page.read_text(encoding="utf-8"), "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                if command := line.split(" #")[0].strip():
                    yield command


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_a_command_names_what_exists(command):
    words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    files = [word for word in words if word.startswith(("examples/", "configs/", "tests/", "docs/"))]
    assert [file for file in files if not (ROOT / file).exists()] == []
    if words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]) is not None
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    else:
        assert words[0] in ("torchrun", "python", "pip", "export", "git", "cd")


def test_the_keys_of_the_other_implementation_are_shown_as_its_users_have_them():
    (shown,) = [text for text in code_of((ROOT / "docs/migration.md").read_text(), "yaml") if "recompute: true" in text]
    assert yaml.safe_load(shown) == yaml.safe_load(INIT_ARGS)


@pytest.mark.filterwarnings("ignore")
def test_the_table_of_the_planner_is_one_it_prints(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "planning.md").read_text()
    (shown,) = [block for block in code_of(text, "text") if block.startswith("one rank of 2")]
    (command,) = [c for c in commands() if "lightning_chunkmbs plan" in c and "quickstart" in c and "--json" not in c]
    plan(shlex.split(command)[4:])
    printed = capsys.readouterr().out.strip().splitlines()
    assert [line.split("  ")[0] for line in shown.splitlines()] == [line.split("  ")[0] for line in printed]


# -- what the pages cite ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!http)([^)\s]+)\)", text)
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_tests_and_benchmarks_that_are_cited_exist():
    tests = {
        name
        for file in (ROOT / "tests").glob("test_*.py")
        for name in re.findall(r"\bdef (test_\w+)", file.read_text())
    }
    cited = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for path in re.findall(r"`((?:tests|examples|configs|docs)/[\w./]+)(?:::\w+)?`", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
            cited += 1
        for name in re.findall(r"`(?:tests/\w+\.py::)?(test_\w+)`", text):
            assert name in tests, f"{page.name}: {name}"
            cited += 1
    assert cited > 80


# -- errors and warnings ----------------------------------------------------------------------------------------------

# Programming errors of our own, or raised again as another error.
INTERNAL = ("a step that is to run a block waits for it", "shard() comes before this", "has not been gathered where")


def shown(node: ast.AST) -> str:
    """A text as it is in the sources, with … in place of what is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def texts(tree: ast.AST) -> list[str]:
    return [text for node in ast.walk(tree) if (text := shown(node))]


def sources() -> Iterator[ast.AST]:
    for file in sorted((ROOT / "lightning_chunkmbs").glob("*.py")):
        yield ast.parse(file.read_text())


def messages() -> Iterator[str]:
    """The longest text in each `raise` and in each call that warns."""
    for tree in sources():
        for node in ast.walk(tree):
            warns = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
                "warn",
                "warn_here",
                "rank_zero_warn",
            )
            if warns or (isinstance(node, ast.Raise) and node.exc is not None):
                longest = max(texts(node), key=len, default="")
                if len(longest) > 25:
                    yield longest


def fragments() -> list[str]:
    """The texts that the page quotes: the first cell of its tables' rows."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)


def test_each_text_that_troubleshooting_quotes_is_one_of_ours():
    known = [text for tree in sources() for text in texts(tree)]
    assert len(fragments()) > 100
    assert [f for f in fragments() if not any(f in text for text in known)] == []


def test_each_error_and_warning_is_in_troubleshooting():
    quoted = [*fragments(), *INTERNAL]
    assert len(list(messages())) > 100
    assert [m for m in messages() if not any(f in m for f in quoted)] == []


def test_no_text_is_quoted_twice():
    assert sorted(fragments()) == sorted(set(fragments()))
