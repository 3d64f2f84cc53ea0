"""Write ``docs/configuration.md`` from the docstrings and signatures of what users configure::

python docs/generate.py
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import lightning_chunkmbs

PAGE = Path(__file__).with_name("configuration.md")

# What is described, and the heading of its part.
PARTS = {
    "ChunkMBSStrategy": "The strategy",
    "ChunkMBSPlan": "`chunkmbs_plan`",
    "RecomputePlan": "`recompute_plan`",
    "ActivationOffloadPlan": "`activation_offload_plan`",
    "FSDPPlan": "`fsdp_plan`",
    "ChunkMBSMixin": "Plans on the module",
    "ChunkMBSMonitor": "The monitor",
    "ShardedWeightAveraging": "Averages of weights",
    "StepReport": "What `strategy.step_report` holds",
}

HEAD = """\
# Configuration

<!-- Written by docs/generate.py from the docstrings; change these, then run it. tests/test_docs.py compares. -->

Everything that can be set, from Python or from yaml (below `trainer.strategy.init_args`), with its default. Plans are
dataclasses in Python and mappings in yaml; an unknown key is refused by its name (`tests/test_plans.py`). Patterns in
`apply_modules` are explained in [the plans](plans.md) and shown by `tests/test_patterns.py`.
"""

_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Example)::?$")
_ENTRY = re.compile(r"^    (\w+): (.*)$")


def sections(doc: str) -> dict[str, list[str]]:
    """Split a Google-style docstring into its sections; the text before the first is under ``""``."""
    found: dict[str, list[str]] = {"": []}
    lines = found[""]
    for line in inspect.cleandoc(doc).splitlines():
        heading = _SECTION.match(line)
        if heading:
            lines = found.setdefault(heading[1], [])
        else:
            lines.append(line)
    return found


def entries(lines: list[str]) -> dict[str, str]:
    """Return the entries of a section, by name, each in one line."""
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        entry = _ENTRY.match(line)
        if entry:
            name, found[entry[1]] = entry[1], entry[2]
        elif line.strip() and name:
            found[name] += f" {line.strip()}"
    return found


def markdown(text: str) -> str:
    """Write what a docstring says in Markdown."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`")


def fields_of(cls: type) -> dict[str, tuple[str, str]]:
    """Return type and default of what a class is given, by name."""
    if dataclasses.is_dataclass(cls):
        return {f.name: (str(f.type), _default_of_field(f)) for f in dataclasses.fields(cls)}
    parameters = list(inspect.signature(cls).parameters.values())
    if not parameters:
        return {name: (str(kind), repr(getattr(cls, name))) for name, kind in inspect.get_annotations(cls).items()}
    return {p.name: (str(p.annotation), _shown(p.default, inspect.Parameter.empty)) for p in parameters}


def _default_of_field(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    return _shown(field.default, dataclasses.MISSING)


def _shown(default: Any, none: Any) -> str:
    return "" if default is none else repr(default).replace("datetime.", "")


def part(cls: type, heading: str) -> str:
    """Return the part of the page about one class.

    Raises:
        ValueError: docstring and signature name other things.
    """
    text = sections(cls.__doc__ or "")
    meanings, fields = entries(text.get("Args") or text.get("Attributes") or []), fields_of(cls)
    if list(meanings) != list(fields):
        raise ValueError(f"{cls.__name__} takes {list(fields)}, and its docstring describes {list(meanings)}.")
    rows = []
    for name, meaning in meanings.items():
        kind, default = (f"`{value}`".replace("|", "\\|") if value else "required" for value in fields[name])
        rows.append(f"| `{name}` | {kind} | {default} | {markdown(meaning).replace('|', chr(92) + '|')} |")
    about = markdown("\n".join(text[""]).strip())
    table = ["| field | type | default | meaning |", "|---|---|---|---|", *rows]
    return f"## {heading}\n\n`lightning_chunkmbs.{cls.__name__}`. {about}\n\n" + "\n".join(table) + "\n"


def page() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *(part(getattr(lightning_chunkmbs, name), heading) for name, heading in PARTS.items())])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
