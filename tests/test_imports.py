"""Imports run one way: the Lightning side at the top, plain helpers at the bottom (and never back up)."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.ranks import ROOT

PACKAGE = "lightning_chunkmbs"
ROWS = [
    # the Lightning side
    {
        "strategy",
        "declared",
        "window",
        "mixin",
        "precision",
        "checkpoints",
        "monitor",
        "averaging",
        "even_data",
        "one_trainer",
        "signals",
        "setup_checks",
        "plan_command",
        "auto_chunks",
        "rehearsal",
        "cli",
        "__main__",
    },
    {"checkpoint_states", "consolidate", "saved_tensors"},
    {"places"},
    {"plan_report"},
    {"planner"},
    {"apply"},
    {"checks", "coverage"},
    {"lockstep"},
    {"chains"},
    {"fake_step", "step_memory"},
    {"fake_chunk", "fake_optimizer", "guards", "step_attributes", "step_logs", "step_state"},
    {"sharding", "materialize", "replicated", "same_batch"},
    {"groups"},
    {"prefetch", "unused"},
    {"fsdp2", "host_parameters"},
    {"counted"},
    {"block"},
    {"chunk_runs"},
    {"joining", "recompute", "ties"},
    {"chunked_tensor"},
    {"host_functions"},
    {"host_tensor"},
    {"offload"},
    {"stored_activation"},
    {"host_buffers"},
    {"streams"},
    {"out_of_memory"},
    {"arguments"},
    {"agree", "compiled", "fake_save_ops", "fake_tensors", "meshes", "packed", "step_bytes", "storages", "twins"},
    {
        "block_buffers",
        "caches",
        "dtypes",
        "failures",
        "kept_ties",
        "patterns",
        "plans",
        "process_groups",
        "profiling",
        "recorders",
        "report",
        "selective",
        "step_time",
        "trees",
        "unknown_values",
    },
]
LEVEL = {module: row for row, modules in enumerate(ROWS) for module in modules}
LIGHTNING = {"lightning", "lightning_fabric", "pytorch_lightning"}
MAX_LINES = 350

FILES = {path.relative_to(ROOT / PACKAGE).with_suffix("").as_posix(): path for path in (ROOT / PACKAGE).rglob("*.py")}
MODULES = {module: path for module, path in FILES.items() if module != "__init__"}


def imported(path: Path) -> Iterator[str]:
    """Every name imported anywhere in a file, also inside functions and under TYPE_CHECKING, as an absolute one."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level < 2, f"{path.name}:{node.lineno}: the package is flat, so `from ..` leaves it"
            module = ".".join(filter(None, [PACKAGE if node.level else "", node.module]))
            # `from package import x` is an import of x where x is one of our modules.
            yield from (f"{module}.{alias.name}" if module == PACKAGE else module for alias in node.names)


def ours(path: Path) -> set[str]:
    """The modules of the package that a file imports; the package itself appears as ``__init__``."""
    names = [name.split(".") for name in imported(path)]
    inner = {parts[1] if len(parts) > 1 else "__init__" for parts in names if parts[0] == PACKAGE}
    return {name if name in FILES else "__init__" for name in inner}


def test_every_module_has_a_place():
    assert MODULES, f"{PACKAGE} is empty"
    unknown = sorted(MODULES.keys() - LEVEL.keys())
    assert not unknown, f"give these modules a row in {Path(__file__).name}, where their imports may point: {unknown}"


@pytest.mark.parametrize("module", sorted(MODULES.keys() & LEVEL.keys()))
def test_imports_point_down(module):
    upward = {name for name in ours(MODULES[module]) if LEVEL.get(name, -1) < LEVEL[module]}
    assert not upward, f"{module} imports {sorted(upward)} from above it"
    outside = {name.partition(".")[0] for name in imported(MODULES[module])}
    assert LEVEL[module] == 0 or not outside & LIGHTNING, f"{module} imports lightning, which only the top row may"


def test_no_cycle_within_a_row():
    graph = {module: ours(path) - {"__init__"} for module, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' > '.join(error.args[1])}")


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_is_one_thing(name):
    lines = len(FILES[name].read_text(encoding="utf-8").splitlines())
    assert lines < MAX_LINES, f"{name} has {lines} lines: it is probably two things"


PROBE = """
import os, random, signal, sys, warnings
import lightning.pytorch, torch
from lightning.pytorch.strategies import StrategyRegistry

def state():
    return {
        "process group": torch.distributed.is_initialized(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "random numbers": (torch.get_rng_state().tolist(), random.getstate()),
        "CUDA": torch.cuda.is_initialized(),
        "environment": dict(os.environ),
        "warning filters": list(warnings.filters),
        "signal handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "optional packages": {"transformers", "sklearn", "matplotlib"} & set(sys.modules),
    }

before, strategies = state(), set(StrategyRegistry)
import lightning_chunkmbs
changed = [name for name, value in state().items() if value != before[name]]
assert not changed, f"importing the package changes {changed}"
assert set(StrategyRegistry) - strategies == {"chunkmbs"}, set(StrategyRegistry) - strategies
"""


def test_importing_only_registers_the_strategy():
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stdout
