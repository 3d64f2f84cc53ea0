"""Where checkpoints are: one over another, of both formats, on other filesystems, and runs killed while they write."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_chunkmbs import checkpoints
from lightning_chunkmbs.places import Place
from tests.ranks import RankFailure, raises_on_ranks, run_on_ranks
from tests.strategy_models import apart, build, chunked, fit, loader, parameters, trainer_of
from tests.test_checkpoints import Scheduled

FORMATS = pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "whole"])


def trained(sharded, epochs=1, **options):
    module = build(Scheduled)
    trainer = fit(module, chunked(save_distributed_checkpoint=sharded), max_epochs=epochs, **options)
    return trainer, parameters(module)


def loaded(path):
    torch.manual_seed(123)
    module = Scheduled()
    trainer_of(chunked(), limit_val_batches=1).validate(module, loader(), ckpt_path=str(path), verbose=False)
    return parameters(module)


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def one_over_another(sharded, folder):
    path = Path(folder, "last.ckpt")
    for over in (not sharded, sharded, sharded):
        trainer, values = trained(over, epochs=1 + over)
        trainer.save_checkpoint(path)
        assert path.is_dir() == over
        assert apart(loaded(path), values) == 0
        dist.barrier()
        assert names(folder) == ["last.ckpt"]


def over_a_link(sharded, folder):
    """As `ModelCheckpoint(save_last="link")` leaves one: writing through it would change the other checkpoint."""
    best, last = Path(folder, "best.ckpt"), Path(folder, "last.ckpt")
    trainer, values = trained(sharded)
    trainer.save_checkpoint(best)
    if dist.get_rank() == 0:
        last.symlink_to(best.name)
    dist.barrier()
    other, later = trained(sharded, epochs=2)
    other.save_checkpoint(last)
    assert apart(values, later) > 0
    assert apart(loaded(best), values) == apart(loaded(last), later) == 0
    assert not last.is_symlink()
    trainer.strategy.remove_checkpoint(last)
    dist.barrier()
    assert names(folder) == ["best.ckpt"]


def other_files_in_the_folder(folder):
    path = Path(folder, "last.ckpt")
    trainer, values = trained(True)
    trainer.save_checkpoint(path)
    if dist.get_rank() == 0:
        path.joinpath("notes.txt").write_text("mine")
        path.joinpath("__7_0.distcp").write_bytes(b"left by a run on more ranks")
    dist.barrier()
    trainer.save_checkpoint(path)
    assert path.joinpath("notes.txt").read_text() == "mine"
    assert not path.joinpath("__7_0.distcp").exists()
    assert apart(loaded(path), values) == 0
    trainer, _ = trained(False)
    with pytest.raises(RuntimeError, match=r"IsADirectoryError.*such as notes\.txt"):
        trainer.save_checkpoint(path)
    assert apart(loaded(path), values) == 0


def one_rank_cannot_write(folder):
    trainer, _ = trained(True)
    Path(folder, "file").touch()
    trainer.save_checkpoint(Path(folder, "file", "last.ckpt"))


def nothing_to_load(folder):
    Path(folder, "empty").mkdir(exist_ok=True)
    loaded(Path(folder, "empty"))


def through_a_url(sharded, prefix):
    url = f"{prefix}/last.ckpt"
    for epochs in (1, 2):
        trainer, values = trained(sharded, epochs=epochs)
        trainer.save_checkpoint(url)
        assert apart(loaded(url), values) == 0
    resumed = Scheduled()
    trainer_of(chunked(), max_epochs=3).fit(resumed, loader(), ckpt_path=url)
    assert apart(parameters(resumed), trained(sharded, epochs=3)[1]) == 0
    if prefix.startswith("memory"):
        left = MemoryFileSystem().find(prefix)
        assert left
        assert all(name.startswith("/folder/last.ckpt") for name in left)
        assert not Path("memory:").exists()  # where a URL taken for a path would go
        trainer.strategy.remove_checkpoint(url)
        assert not MemoryFileSystem().find(prefix)


def with_a_plugin(folder):
    """A plugin writes when it likes; what it writes is found all the same."""
    path = Path(folder, "last.ckpt")
    trainer, _ = trained(True)
    trainer.save_checkpoint(path)
    module = build(Scheduled)
    strategy = chunked(save_distributed_checkpoint=False)
    trainer = fit(module, strategy, max_epochs=2, plugins=[AsyncCheckpointIO()])
    trainer.save_checkpoint(path)
    strategy.checkpoint_io.teardown()
    dist.barrier()
    assert path.is_file()
    assert apart(loaded(path), parameters(module)) == 0


def killed(moment, sharded, folder):
    """The first rank of a run dies while it writes over its last checkpoint."""
    trainer, _ = trained(sharded, epochs=2)

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 0:
        if moment == "before what is not in shards":
            checkpoints.torch = type("Dying", (), {"save": die})
        elif moment == "before the new one is put there":
            Place.complete = die
        elif moment == "between two names":
            replace, calls = os.replace, []

            def second(*args):
                calls.append(args)
                die() if len(calls) == 2 else replace(*args)

            os.replace = second
        elif moment == "while the one before is removed":
            import shutil

            shutil.rmtree = lambda path, **kwargs: die() if not kwargs else None
    trainer.save_checkpoint(Path(folder, "last.ckpt"))


def first_saved(sharded, folder):
    trainer, values = trained(sharded)
    trainer.save_checkpoint(Path(folder, "last.ckpt"))
    return values


def after_the_kill(sharded, folder, old, new_is_there):
    expected = trained(sharded, epochs=2)[1] if new_is_there else old
    path = Path(folder, "last.ckpt")
    assert apart(loaded(path), expected) == 0
    # As after a restart that asks for the last one, whatever its name is now.
    trainer, _ = trained(sharded, epochs=2)
    saving = trainer_of(chunked(), default_root_dir=folder, enable_checkpointing=True, max_epochs=3)
    saving.checkpoint_callback.dirpath = folder
    again = Scheduled()
    saving.fit(again, loader(), ckpt_path="last")
    assert saving.global_step == 9
    assert len(again.seen) == (3 if new_is_there else 6)
    trainer.save_checkpoint(path)
    dist.barrier()
    assert not [name for name in names(folder) if ".new" in name or ".old" in name]


@FORMATS
def test_a_checkpoint_takes_the_place_of_another(sharded, tmp_path):
    run_on_ranks(2, one_over_another, sharded, str(tmp_path))


@FORMATS
def test_a_checkpoint_takes_the_place_of_a_link(sharded, tmp_path):
    run_on_ranks(2, over_a_link, sharded, str(tmp_path))


def test_other_files_in_a_checkpoints_folder_stay(tmp_path):
    run_on_ranks(2, other_files_in_the_folder, str(tmp_path))


def test_a_failure_to_write_is_raised_on_every_rank(tmp_path):
    raised = raises_on_ranks(2, one_rank_cannot_write, str(tmp_path))
    assert [name for name, _ in raised] == ["RuntimeError"] * 2
    assert all("could not be written" in message for _, message in raised)


def test_no_checkpoint_at_a_path(tmp_path):
    raised = raises_on_ranks(2, nothing_to_load, str(tmp_path))
    assert [name for name, _ in raised] == ["FileNotFoundError"] * 2
    assert all("neither a file nor a folder with" in message for _, message in raised)


@FORMATS
def test_a_file_url_on_two_ranks(sharded, tmp_path):
    run_on_ranks(2, through_a_url, sharded, f"file://{tmp_path}")
    assert names(tmp_path) == ["last.ckpt"]


@FORMATS
def test_a_filesystem_in_memory(sharded):
    run_on_ranks(1, through_a_url, sharded, "memory://folder")


def test_a_plugin_writes_whole_checkpoints(tmp_path):
    run_on_ranks(2, with_a_plugin, str(tmp_path))


KILLS = [
    ("before what is not in shards", True, False),
    ("before the new one is put there", True, False),
    ("between two names", True, False),
    ("while the one before is removed", True, True),
    ("before the new one is put there", False, False),
]


@pytest.mark.parametrize(("moment", "sharded", "new_is_there"), KILLS)
def test_a_run_killed_while_it_writes_loses_no_checkpoint(moment, sharded, new_is_there, tmp_path):
    old, _ = run_on_ranks(2, first_saved, sharded, str(tmp_path))
    with pytest.raises(RankFailure, match="exit code -9|died|SIGKILL|-9"):
        run_on_ranks(2, killed, moment, sharded, str(tmp_path))
    run_on_ranks(2, after_the_kill, sharded, str(tmp_path), old, new_is_there)
