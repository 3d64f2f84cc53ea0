"""The pool of ranks on which the other tests stand."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import ranks
from tests.collectives import count_collectives
from tests.ranks import ROOT, RankFailure, raises_on_ranks, run_on_ranks


def summed_ranks(offset):
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return os.getpid(), dist.get_rank(), total


def fail_on(failing):
    print("about to fail")
    if dist.get_rank() in failing:
        raise KeyError(f"rank {dist.get_rank()} has no such thing")
    if failing:
        dist.barrier()


def fail_out_of_step():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
    raise ValueError("out of step")


def sleep_on(rank, seconds):
    if dist.get_rank() == rank:
        time.sleep(seconds)


def exit_with(status):
    os._exit(status)


def leave_traces():
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def observed():
    state = os.environ.get("LEFT_BEHIND"), os.getcwd(), torch.get_default_dtype(), torch.is_grad_enabled()
    return state, torch.rand(1).item()


def environment_of_lightning():
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    trainer = Trainer(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", logger=False)
    trainer.strategy.setup_environment()
    environment = trainer.strategy.cluster_environment
    return isinstance(environment, TorchElasticEnvironment), trainer.world_size, trainer.global_rank


def collectives_of_a_step(reshard_after_forward):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 2))
    for block in model[:3]:
        fully_shard(block, reshard_after_forward=reshard_after_forward)
    fully_shard(model)
    with count_collectives() as counted:
        model(torch.randn(2, 4)).sum().backward()
    model(torch.randn(2, 4))
    return counted.all_gathers, counted.reduce_scatters, counted.all_reduces


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr(ranks, "GRACE", 1.0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_results_come_back_by_rank_from_ranks_that_live_on(world_size):
    first = run_on_ranks(world_size, summed_ranks, 10)
    second = run_on_ranks(world_size, summed_ranks, 20)
    assert [rank for _, rank, _ in first] == list(range(world_size))
    assert all(total == sum(range(world_size)) + 10 * world_size for *_, total in first)
    assert [pid for pid, *_ in first] == [pid for pid, *_ in second]


def test_a_failure_shows_its_traceback_and_output_and_the_pool_recovers(short_grace):
    with pytest.raises(
        RankFailure, match=r"(?s)rank 0: had not answered.*rank 1: Traceback.*rank 1 has no such thing"
    ) as e:
        run_on_ranks(2, fail_on, [1])
    assert "about to fail" in str(e.value)
    assert "in fail_on" in str(e.value).split("---- rank 1")[0]  # where rank 0 hung
    assert len(run_on_ranks(2, summed_ranks, 0)) == 2


def test_a_failure_of_all_ranks_keeps_them_if_they_are_in_step(short_grace):
    before = run_on_ranks(2, summed_ranks, 0)
    assert raises_on_ranks(2, fail_on, [0, 1]) == [
        ("KeyError", repr(f"rank {rank} has no such thing")) for rank in range(2)
    ]
    kept = run_on_ranks(2, summed_ranks, 0)
    assert [pid for pid, *_ in before] == [pid for pid, *_ in kept]

    raises_on_ranks(2, fail_out_of_step)
    renewed = run_on_ranks(2, summed_ranks, 0)
    assert {pid for pid, *_ in kept}.isdisjoint(pid for pid, *_ in renewed)
    assert [total for *_, total in renewed] == [1, 1]


def test_an_expected_exception_that_does_not_come_is_a_failure():
    with pytest.raises(RankFailure, match=r"(?s)did not raise on every rank.*rank 0: returned.*rank 1: returned"):
        raises_on_ranks(2, fail_on, [])


def test_a_hang_is_ended_by_the_timeout_and_the_pool_recovers():
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)rank 0: returned.*rank 1: had not answered after 1 s.*in sleep_on"):
        run_on_ranks(2, sleep_on, 1, 100, timeout=1)
    assert time.monotonic() - start < 20
    assert len(run_on_ranks(2, summed_ranks, 0)) == 2


def test_a_rank_that_dies_is_reported():
    with pytest.raises(RankFailure, match=r"rank 0: died \(exit status 3\)"):
        run_on_ranks(1, exit_with, 3)


def test_a_task_starts_from_a_clean_state():
    clean = run_on_ranks(2, observed)
    run_on_ranks(2, leave_traces)
    assert run_on_ranks(2, observed) == clean == [((None, str(ROOT), torch.float32, True), clean[0][1])] * 2


def test_lightning_joins_the_group_of_the_pool():
    assert run_on_ranks(2, environment_of_lightning) == [(True, 2, 0), (True, 2, 1)]


@pytest.mark.parametrize(("reshard_after_forward", "gathers"), [(True, 7), (False, 4)])
def test_collectives_of_fsdp_are_counted(reshard_after_forward, gathers):
    assert run_on_ranks(2, collectives_of_a_step, reshard_after_forward) == [(gathers, 4, 0)] * 2


def test_ranks_end_with_a_killed_test_run():
    program = (
        "import os, signal, threading; from tests.ranks import run_on_ranks; from tests.test_ranks import *\n"
        "print(run_on_ranks(1, summed_ranks, 0)[0][0], flush=True)\n"
        "threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()\n"
        "run_on_ranks(1, sleep_on, 0, 100)"
    )
    tests = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert tests.returncode == -signal.SIGKILL
    pid = int(tests.stdout)
    deadline = time.monotonic() + 10
    while _runs(pid):
        assert time.monotonic() < deadline, "a rank outlives its tests"
        time.sleep(0.1)


def _runs(pid):
    try:
        os.kill(pid, 0)
        # An orphan that has ended stays until somebody collects it.
        return not re.search(r"\) Z", Path(f"/proc/{pid}/stat").read_text()) if sys.platform == "linux" else True
    except OSError:
        return False
