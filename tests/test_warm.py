"""A program in a fork of the nursery is, to who started it, as one in a new interpreter."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.warm import python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere python() is the interpreter")

PROGRAM = """
import json, os, random, subprocess, sys, time
forked = "lightning" in sys.modules
import torch

def told(**more):
    from lightning.pytorch.utilities import rank_zero_only

    network = os.stat("/proc/self/ns/net").st_ino
    drawn = [random.random(), torch.rand(1).item()]
    print(json.dumps({"name": __name__, "arguments": sys.argv[1:], "folder": os.getcwd(), "path": sys.path[0]}
        | {"variable": os.environ.get("VARIABLE"), "rank": rank_zero_only.rank, "id": os.getpid()}
        | {"network": network, "drawn": drawn, "forked": forked} | more), flush=True)

what, *rest = sys.argv[1:]
if what == "child":
    started = subprocess.run([sys.executable, __file__, "tell"], text=True, capture_output=True, check=True)
    told(child=json.loads(started.stdout))
elif what == "tell":
    told()
elif what == "exit":
    print("why", file=sys.stderr)
    sys.exit(int(rest[0]))
elif what == "raise":
    raise ValueError("the cause")
elif what == "kill":
    os.kill(os.getpid(), int(rest[0]))
elif what == "wait":
    told()
    time.sleep(100)
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return str(tmp_path / "program.py")


def run(*command, **options):
    return subprocess.run([python(), *command], text=True, capture_output=True, timeout=100, check=False, **options)


def told_by(*command, **options):
    done = run(*command, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_has_the_arguments_folder_environment_and_network(program, tmp_path):
    here = os.stat("/proc/self/ns/net").st_ino
    environment = os.environ | {"VARIABLE": "value", "RANK": "3"}
    expected = {"name": "__main__", "folder": str(tmp_path), "path": str(tmp_path), "variable": "value", "rank": 3}
    for command in ([program], ["-u", program], ["-m", "program"]):
        found = told_by(*command, "tell", "é --x", env=environment, cwd=tmp_path)
        assert {name: found[name] for name in expected} == expected
        assert found["arguments"] == ["tell", "é --x"]
        assert found["network"] == here


def test_what_it_starts_is_forked_too_and_draws_other_numbers(program):
    first = told_by(program, "child")
    assert first["forked"]
    assert first["child"]["forked"]
    assert first["child"]["arguments"] == ["tell"]
    assert first["child"]["id"] != first["id"]
    assert first["drawn"] != first["child"]["drawn"]


@pytest.mark.parametrize(("how", "status"), [("exit", 0), ("exit", 7), ("kill", 0), ("raise", 1)])
def test_its_end_is_that_of_the_process_in_its_place(program, how, status):
    if how == "kill":
        for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM):
            assert run(program, how, str(int(number))).returncode == -number
        return
    done = run(program, how, str(status))
    assert done.returncode == status
    assert done.stderr.splitlines()[-1] == ("why" if how == "exit" else "ValueError: the cause")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_it_ends_with_the_process_in_its_place(program, number):
    with subprocess.Popen([python(), program, "wait"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as started:
        pid = json.loads(started.stdout.readline())["id"]
        assert pid != started.pid
        started.send_signal(number)
        assert started.wait(50) == -number
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end, "it outlives the process in its place"
        time.sleep(0.02)


def test_other_commands_have_a_new_interpreter():
    assert run("-c", "import sys; print(sys.executable, 'torch' in sys.modules)").stdout.split() == [
        sys.executable,
        "False",
    ]
