"""The command line: what parses, what comes back from ``--print_config``, and what errors say."""

import textwrap
from pathlib import Path

import pytest
import yaml

from lightning_chunkmbs.cli import main
from tests.documented import INIT_ARGS

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
QUICKSTART = str(ROOT / "configs" / "quickstart_cpu.yaml")


@pytest.fixture(autouse=True)
def _run_from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configs name the modules of ``examples`` as ``python -m`` finds them: from the folder above."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr("sys.argv", ["lightning_chunkmbs"])


def strategy_file(folder: Path, init_args: str) -> str:
    """A yaml file that sets the strategy alone, to be read after another config."""
    header = "trainer:\n  strategy:\n    class_path: lightning_chunkmbs.ChunkMBSStrategy\n    init_args:\n"
    path = folder / "strategy.yaml"
    path.write_text(header + textwrap.indent(init_args, 6 * " "))
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *configs: str) -> str:
    """What ``fit --print_config`` prints for these files."""
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *(f"--config={config}" for config in configs), "--print_config"])
    out, err = capsys.readouterr()
    assert stopped.value.code in (0, None), err
    return out


def error_of(capsys: pytest.CaptureFixture[str], *configs: str) -> str:
    """What a refused command prints."""
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *(f"--config={config}" for config in configs)])
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_every_config_parses_and_uses_the_strategy(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = yaml.safe_load(printed(capsys, str(config)))["trainer"]
    assert trainer["strategy"]["class_path"] == "lightning_chunkmbs.ChunkMBSStrategy"


def test_print_config_is_a_config_that_prints_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = printed(capsys, QUICKSTART, strategy_file(tmp_path, INIT_ARGS))
    again = tmp_path / "printed.yaml"
    again.write_text(first)
    assert printed(capsys, str(again)) == first


def test_the_documented_keys_parse_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml.safe_load(printed(capsys, QUICKSTART, strategy_file(tmp_path, INIT_ARGS)))
    parsed, written = config["trainer"]["strategy"]["init_args"], yaml.safe_load(INIT_ARGS)
    for key, value in written.items():
        if isinstance(value, dict):
            assert {name: parsed[key][name] for name in value} == value
        else:
            assert parsed[key] == value


def test_the_documented_keys_build_the_strategy(tmp_path: Path) -> None:
    from lightning_chunkmbs import ChunkMBSStrategy

    cli = main([f"--config={QUICKSTART}", f"--config={strategy_file(tmp_path, INIT_ARGS)}"], run=False)
    assert type(cli.trainer.strategy) is ChunkMBSStrategy


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("chunk_arg_indexs", "chunk_arg_indices"),
        ("chunk_mbs: 2", "chunk_mb: 2"),
        ("enable_activation_offload", "enable_offload"),
        ("activation_offload_plan", "offload_plan"),
    ],
)
def test_misspelt_keys_are_rejected_by_name(
    right: str, wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    misspelt = strategy_file(tmp_path, INIT_ARGS.replace(right, wrong))
    assert wrong.split(":")[0] in error_of(capsys, QUICKSTART, misspelt)


@pytest.mark.parametrize("pattern", ["model.layers.{*}", "model.layers.{0-3}"])
def test_an_unquoted_pattern_in_a_flow_list_is_explained(
    pattern: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unquoted = strategy_file(tmp_path, f"chunkmbs_plan:\n  apply_modules: [{pattern}]\n")
    message = error_of(capsys, QUICKSTART, unquoted)
    assert "must be quoted" in message
    assert 'apply_modules: ["model.layers.{*}"]' in message


def test_other_yaml_errors_stay_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("trainer: 'unclosed\n")
    assert "must be quoted" not in error_of(capsys, str(broken))
