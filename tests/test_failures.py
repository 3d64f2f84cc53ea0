"""A rank that fails tells the others why."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from unittest.mock import patch

import pytest
import torch.distributed as dist

from lightning_chunkmbs import failures
from lightning_chunkmbs.failures import Failures, is_communication_error
from tests.ranks import ROOT, run_on_ranks
from tests.warm import python

UNREACHABLE = "Rank 0, which hosts the group's store, cannot be reached any more: see its log for the cause."
CLOSED = "[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1234"


def explained(errors: list[BaseException | None], grace: float) -> tuple[str, list[str]]:
    """Explain each rank's error, if it has one; returns this rank's with its notes."""
    error, told = errors[dist.get_rank()], Failures()
    if error is None:
        return "", []
    with patch.object(failures, "_GRACE", grace):
        told.explain(error)
    return str(error), list(getattr(error, "__notes__", []))


def explained_in_turn(errors: list[BaseException | None], grace: float) -> tuple[str, list[str]]:
    """As ``explained``, the last rank first: the first to fail is not the first rank."""
    for rank in reversed(range(dist.get_world_size())):
        if rank == dist.get_rank() and rank > 0:
            result = explained(errors, grace)
        dist.barrier()
    return explained(errors, grace) if dist.get_rank() == 0 else result


@pytest.mark.parametrize("lost", [RuntimeError(CLOSED), dist.DistBackendError("Timed out waiting 1000ms for recv")])
def test_the_cause_is_another_rank_s_error(lost):
    (message, notes), (_, own) = run_on_ranks(2, explained, [lost, ArithmeticError("the cause")], 10.0)
    assert message == str(lost)
    assert notes == ["Rank 1 failed first, and this rank by it: ArithmeticError: the cause"]
    assert own == []


def test_of_several_causes_the_first_is_named():
    errors = [RuntimeError(CLOSED), ValueError("later"), KeyError("first")]
    (_, notes), *_ = run_on_ranks(3, explained_in_turn, errors, 10.0)
    assert notes == ["Rank 2 failed first, and this rank by it: KeyError: 'first'"]


def test_a_rank_of_which_nothing_is_heard_is_named():
    (_, notes), _ = run_on_ranks(2, explained, [RuntimeError(CLOSED), None], 0.3)
    [note] = notes
    assert note.startswith("Of rank 1 nothing was heard: it was killed")


def test_a_connection_that_is_lost_is_nobody_s_fault():
    for _, [note] in run_on_ranks(2, explained, [RuntimeError(CLOSED), RuntimeError(CLOSED)], 10.0):
        assert note.startswith("No rank failed by itself: the connection between them was lost")


def test_an_error_of_all_ranks_is_left_as_it_is():
    for _, notes in run_on_ranks(2, explained, [ValueError("plan"), ValueError("plan")], 10.0):
        assert notes == []


def test_a_store_that_is_gone_is_rank_0_s():
    class Gone:
        def add(self, *_: object) -> int:
            raise dist.DistNetworkError("Broken pipe")

    told, error = Failures(), RuntimeError(CLOSED)
    told._store, told._size = Gone(), 2
    told.explain(error)
    assert error.__notes__ == [UNREACHABLE]


def test_a_store_that_does_not_answer_is_not_waited_for():
    class Silent:
        def __init__(self) -> None:
            self.over = threading.Event()

        def add(self, *_: object) -> int:
            self.over.wait(60)
            raise dist.DistNetworkError("Broken pipe")

    told, error, other = Failures(), RuntimeError(CLOSED), ValueError("mine")
    told._store, told._size = store, _ = Silent(), 2
    with patch.object(failures, "_GRACE", 0.1), patch.object(failures, "_ANSWER", 0.1):
        told.explain(error)
        told.explain(other)
    store.over.set()
    assert error.__notes__ == [UNREACHABLE]
    assert not hasattr(other, "__notes__")


def test_what_is_an_error_of_communication():
    assert is_communication_error(RuntimeError(CLOSED))
    assert is_communication_error(dist.DistStoreError("wait timeout after 1000ms"))
    assert not is_communication_error(RuntimeError("The size of tensor a must match the size of tensor b"))
    assert not is_communication_error(ValueError("gloo"))


def started(kind: str, who: int) -> list[subprocess.Popen[str]]:
    """Both ranks of a run, with nobody to end the other when one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"} | {
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "failing",
        "OMP_NUM_THREADS": "1",
    }
    grace = ["1"] if kind == "kill" else []  # where no other rank tells anything, none is waited for
    if sys.platform == "linux":
        shared["GLOO_SOCKET_IFNAME"] = "lo"
    return [
        subprocess.Popen(
            [python(), "-m", "tests.failing_job", kind, str(who), *grace],
            cwd=ROOT,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("kind", "who", "note"),
    [
        ("raise", 1, "Rank 1 failed first, and this rank by it: ArithmeticError: the cause"),
        ("kill", 1, "Of rank 1 nothing was heard: it was killed"),
        ("shape", 1, "Rank 1 failed first, and this rank by it: ValueError: net.layers.0: a declared tensor has"),
    ],
)
def test_the_other_rank_ends_and_says_why(kind, who, note):
    ranks = started(kind, who)
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert all(rank.returncode for rank in ranks), outputs
    last = outputs[1 - who].rpartition("Traceback")[2]  # of several errors the one that ends the process
    assert note in last, outputs[1 - who]
    assert ("ArithmeticError: the cause" in outputs[who]) == (kind == "raise")
