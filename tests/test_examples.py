"""The examples run as their READMEs say: two processes, started by Lightning or by torchrun."""

import difflib
import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from examples.benchmarks import common
from examples.benchmarks.accumulation import run as accumulation
from examples.benchmarks.memory import run as memory
from examples.benchmarks.scaling import run as scaling
from examples.timeline import draw as timeline
from tests.ranks import run_on_ranks
from tests.warm import python

ROOT = Path(__file__).resolve().parent.parent
EXISTING = ROOT / "examples" / "existing_module"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
# A free port per run, so that runs do not meet each other.
FREE_PORT = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]


def run(*command: str, timeout: int = 280) -> str:
    """Standard output of a command run from the root; what launchers left in our environment is kept from it."""
    launcher = re.compile(r"(LOCAL_|GROUP_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_\w+|TORCHELASTIC_\w+|PL_GLOBAL_SEED")
    env = {name: value for name, value in os.environ.items() if not launcher.fullmatch(name)}
    done = subprocess.run(command, cwd=ROOT, env=env, timeout=timeout, text=True, capture_output=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def accuracy(output: str) -> float:
    """The one accuracy printed: by the first rank, not by both."""
    (value,) = re.findall(r"test accuracy: ([\d.]+)", output)
    return float(value)


def test_existing_module_changes_what_its_readme_says() -> None:
    before, after = ((EXISTING / name).read_text().splitlines() for name in ("classifier_before.py", "classifier.py"))
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and line[2:].strip()]
    assert [line[2:] for line in changes if line[0] == "-"] == ["class DigitClassifier(LightningModule):"]
    assert len(changes) == 4  # that line anew, and two more
    readme = (EXISTING / "README.md").read_text()
    assert all(f"{line[0]}{line[2:]}" in readme for line in changes)


def test_existing_module_trains_with_lightnings_launcher() -> None:
    assert accuracy(run(python(), "examples/existing_module/train.py")) >= 0.95


def test_existing_module_trains_with_torchrun() -> None:
    """Two epochs of the same training, by chance 0.1."""
    assert accuracy(run(*TORCHRUN, *FREE_PORT, "examples/existing_module/train.py", "--epochs=2")) >= 0.6


def test_main_job_in_short(tmp_path: Path) -> None:
    for name in ("argparse", "ast", "asyncio/tasks", "datetime", "decimal", "enum", "typing"):
        source = Path(os.__file__).parent / f"{name}.py"
        (tmp_path / source.name).write_bytes(source.read_bytes())
    output = run(
        *(python(), "-m", "lightning_chunkmbs", "fit", "--config", "configs/quickstart_cpu.yaml"),
        *("--model.layers=2", f"--data.path={tmp_path}", "--data.val_windows=16"),
        *("--trainer.max_epochs=1", "--trainer.limit_train_batches=4", "--trainer.callbacks.length=60"),
        f"--trainer.logger.init_args.save_dir={tmp_path}",
    )
    first, last = map(float, re.findall(r"validation perplexity after \d+ steps: ([\d.]+)", output))
    assert last < first
    assert re.search(r"ChunkMBS, counted +5 +3$", output, re.MULTILINE)
    assert re.search(r"stock FSDP2, .* computed +40 +24$", output, re.MULTILINE)
    assert re.search(r"--- sample ---\nimport ", output)
    (checkpoint,) = re.findall(r"^checkpoint: (.+)$", output, re.MULTILINE)
    assert (ROOT / checkpoint).exists()


# -- benchmarks -------------------------------------------------------------------------------------------------------

SMALL = {"hidden": 64, "blocks": 2, "tokens": 17, "rounds": 1}


def accumulation_figures() -> dict[str, dict[str, float]]:
    return accumulation.measure(Namespace(devices=2, **SMALL), 2, minutes=0.0)


def test_accumulation_benchmark_compares_like_with_like() -> None:
    rows, _ = run_on_ranks(2, accumulation_figures)
    assert all(row["ms"] > 0 and row["rounds"] == 1 for row in rows.values())
    variants = {name: row for name, row in rows.items() if name != accumulation.FLOOR}
    assert max(row["gradient_error"] for row in variants.values()) < 1e-5
    assert min(row["peak_activations_MB"] for row in variants.values()) > 0
    once, stock = rows["ours, lockstep"], rows["stock"]
    assert stock["gathered_MB"] == 2 * once["gathered_MB"] > 0
    assert stock["reduced_MB"] == 2 * once["reduced_MB"] > 0
    for name in ("one big batch", "cut, checkpoint, join", "ours, cut", "ours, cut, streaming"):
        assert rows[name]["gathered_MB"] == once["gathered_MB"]


def memory_slopes() -> dict[str, float]:
    options = Namespace(devices=1, n=[12, 24], last_token=True, **SMALL)
    peaks = memory.measure(options)
    return {name: memory.slope(by_n, memory.hidden_state(options)) for name, by_n in peaks.items()}


def test_memory_benchmark_finds_what_its_formula_says() -> None:
    [slopes] = run_on_ranks(1, memory_slopes)
    for name, formula in memory.FORMULA.items():
        assert abs(slopes[name] - formula(SMALL["blocks"])) <= 0.3, (name, slopes)
    assert slopes["one big batch"] > slopes["cut, checkpoint, join"] > 2.5


def scaling_figures() -> dict[str, float]:
    return scaling.step_times(Namespace(devices=2, **SMALL), 2, minutes=0.0)


def test_scaling_benchmark_takes_times_side_by_side() -> None:
    found, _ = run_on_ranks(2, scaling_figures)
    assert found["ratio"] == found["ours_ms"] / found["stock_ms"]  # of one round


def test_results_go_to_json_picture_and_readme(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"# Question\n\n{common.START}\nold\n{common.END}\n\nMore.\n")
    for figure in (1, 2):
        text = common.table(["a", "b"], [[figure, "x"]])
        common.write(tmp_path, {"n": 3}, {"figure": figure}, text, lambda plot: plot.plot([1, 2]))
    assert json.loads((tmp_path / "results.json").read_text())["results"] == {"figure": 2}
    assert (tmp_path / "results.png").stat().st_size > 1000
    said = readme.read_text()
    assert said.startswith("# Question")
    assert said.endswith("More.\n")
    assert "| 2 | x |" in said
    assert "| 1 | x |" not in said
    assert "old" not in said


def test_the_timeline_shows_gathers_chunks_and_reductions(tmp_path: Path) -> None:
    names = ["FSDP::all_gather (net.blocks.1)", "gloo:all_gather", "ChunkMBS::block (net.blocks.1) chunk 2/2"]
    names += ["aten::add", "ChunkMBS::block (net.blocks.1) chunk 2/2, recomputed", "FSDP::post_backward_reduce"]
    names += ["FSDP::all_gather_copy_out"]
    events = [{"ph": "X", "name": name, "ts": 1000.0 * i, "dur": 500.0} for i, name in enumerate(names)]
    found = timeline.ranges({"traceEvents": events})
    assert [(r.kind, r.row, r.start) for r in found] == [
        ("gather", "block 1", 0.0),  # where it is carried out
        ("chunk", "block 1", 1.0),
        ("recomputed chunk", "block 1", 3.0),
        ("reduce", "root", 4.0),
    ]
    timeline.draw(found, tmp_path / "timeline.svg")
    assert "recomputed chunk" in (tmp_path / "timeline.svg").read_text()
