"""The examples run as their READMEs say: two processes, started by Lightning or by torchrun."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

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
    assert accuracy(run(sys.executable, "examples/existing_module/train.py")) >= 0.95


def test_existing_module_trains_with_torchrun() -> None:
    assert accuracy(run(*TORCHRUN, *FREE_PORT, "examples/existing_module/train.py")) >= 0.95


def test_main_job_in_short(tmp_path: Path) -> None:
    for name in ("argparse", "ast", "asyncio/tasks", "datetime", "decimal", "enum", "typing"):
        source = Path(os.__file__).parent / f"{name}.py"
        (tmp_path / source.name).write_bytes(source.read_bytes())
    output = run(
        *(sys.executable, "-m", "lightning_chunkmbs", "fit", "--config", "configs/quickstart_cpu.yaml"),
        *("--model.layers=2", f"--data.path={tmp_path}", "--data.val_windows=16"),
        *("--trainer.max_epochs=1", "--trainer.limit_train_batches=4"),
        f"--trainer.logger.init_args.save_dir={tmp_path}",
    )
    first, last = map(float, re.findall(r"validation perplexity after \d+ steps: ([\d.]+)", output))
    assert last < first
    assert re.search(r"ChunkMBS, counted +5 +3$", output, re.MULTILINE)
    assert re.search(r"stock FSDP2, .* computed +40 +24$", output, re.MULTILINE)
    assert re.search(r"--- sample ---\nimport ", output)
    (checkpoint,) = re.findall(r"^checkpoint: (.+)$", output, re.MULTILINE)
    assert (ROOT / checkpoint).exists()
