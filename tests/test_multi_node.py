"""Two nodes: network namespaces on this machine, joined by a link that can be cut."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch

from examples.benchmarks.two_nodes import ADDRESSES, PORT, TwoNodes, why_not
from tests.mesh_models import data_of, train_plainly
from tests.node_job import EPOCHS, WINDOW, Job
from tests.one_window import assert_close, build
from tests.ranks import ROOT
from tests.warm import python

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"two nodes cannot be made: {why_not()}")

LIMIT = 270  # seconds a process may take on a busy machine; no test waits that long
SHORT = 3  # seconds: the timeout of the process group where something is wrong
BLOCKS = 3
STEPS = EPOCHS * 2


@pytest.fixture
def nodes():
    with TwoNodes() as made:
        yield made


class Launched:
    """A job on both nodes, and what it writes."""

    def __init__(self, nodes, tmp_path, commands, environments=({}, {})):
        self.tmp_path, self.processes = tmp_path, []
        for node in (0, 1):
            env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "POSSIBLE_USER_WARNINGS": "off"}
            with open(tmp_path / f"log-{node}", "wb") as log:
                options = {"cwd": ROOT, "stdout": log, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
                self.processes.append(nodes.start(node, commands[node], LIMIT, env | environments[node], **options))

    def output(self, node):
        return (self.tmp_path / f"log-{node}").read_text(errors="replace")

    def wait_for(self, *names):
        while not all((self.tmp_path / name).exists() for name in names):
            assert all(process.poll() is None for process in self.processes), self.output(0) + self.output(1)
            time.sleep(0.02)

    def results(self, ranks):
        """What each rank saved, once all have ended well."""
        for node, process in enumerate(self.processes):
            assert process.wait() == 0, self.output(node)
        return [torch.load(self.tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in range(ranks)]

    def errors(self):
        """What each node wrote, once both have failed by themselves."""
        for node, process in enumerate(self.processes):
            assert process.wait() == 1, f"status {process.returncode} (124: it hung)\n{self.output(node)}"
        return [self.output(node) for node in (0, 1)]


def torchrun(nodes, node, job, **options):
    _, *arguments = nodes.torchrun(node, "-m", "tests.node_job", str(job), devices=job.devices, **options)
    return [python(), *arguments]


def with_torchrun(nodes, tmp_path, job):
    return Launched(nodes, tmp_path, [torchrun(nodes, node, job) for node in (0, 1)])


def with_lightning(nodes, tmp_path, job, port=PORT, second=None):
    """Start one process on each node, from which Lightning starts the others; ``second``: the second's environment."""
    known = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port)}
    environments = ({**known, "NODE_RANK": "0"}, {**known, "NODE_RANK": "1", **(second or {})})
    return Launched(nodes, tmp_path, [[python(), "-m", "tests.node_job", str(job)]] * 2, environments)


def assert_equals_one_process(results):
    """Parameters and norms are those of plain training, and each step gathered and reduced as promised."""
    net = build()
    norms = train_plainly(net, data_of("replicas")[: len(results)], WINDOW, EPOCHS)
    expected = {name: p.detach() for name, p in net.named_parameters()}
    assert len(norms) == STEPS
    for result in results:
        assert_close(result["parameters"], expected, 2e-6)
        assert result["norms"] == pytest.approx(norms, rel=1e-4)
        assert result["counted"] == (STEPS * (2 * BLOCKS + 1), STEPS * (BLOCKS + 1))
        assert [(r.all_gathers, r.reduce_scatters) for r in result["reports"]] == [(7, 4)] * STEPS
    chunks = [[report.chunks for report in result["reports"]] for result in results]
    assert len({tuple(counts) for counts in chunks}) > 1  # ranks differ in what they cut
    assert max(map(max, chunks)) > WINDOW * BLOCKS


def test_training_goes_on_after_the_link_was_gone(nodes, tmp_path):
    launched = with_torchrun(nodes, tmp_path, Job(out=str(tmp_path), hold=True))
    launched.wait_for("waiting-0", "waiting-1")
    nodes.set_link(up=False)
    (tmp_path / "go").touch()
    time.sleep(3)
    assert not list(tmp_path.glob("passed-*")), "the step did not need the link"
    nodes.set_link(up=True)
    results = launched.results(2)
    assert len(list(tmp_path.glob("passed-*"))) == 2
    assert_equals_one_process(results)
    assert all(result["gathering"] == [0, 1] for result in results)


def test_replicas_on_nodes_started_by_lightning(nodes, tmp_path):
    results = with_lightning(nodes, tmp_path, Job(out=str(tmp_path), devices=2, replicas=2)).results(4)
    assert_equals_one_process(results)
    assert [result["gathering"] for result in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]  # within a node


def test_a_link_that_stays_away_ends_both_nodes(nodes, tmp_path):
    launched = with_lightning(nodes, tmp_path, Job(out=str(tmp_path), hold=True, timeout=3 * SHORT, grace=SHORT))
    launched.wait_for("waiting-0", "waiting-1")
    nodes.set_link(up=False)
    (tmp_path / "go").touch()
    for output in launched.errors():
        assert re.search("timed out|timeout", output, re.IGNORECASE), output
        assert re.search("nothing was heard|cannot be reached", output.splitlines()[-1]), output
        assert re.search(r"in agree\n|all_gather", output), output  # whichever of the step comes first
    assert not list(tmp_path.glob("passed-*"))


NOT_ALL = "waiting for clients. {}/{} clients joined"
WRONG = {
    "port": (
        {"MASTER_PORT": "29511"},
        NOT_ALL.format(1, 2),
        r"timed out after \d+ms while trying to connect to \(10.77.0.1, 29511\)",
    ),
    "address": (
        {"MASTER_ADDR": "10.77.0.9"},
        NOT_ALL.format(1, 2),
        r"(failed to connect to|timed out) .*\(10.77.0.9, 29501\)",
    ),
    "number of nodes": ({}, NOT_ALL.format("[12]", 3), r"Dist(Store|Network)Error"),
}


def test_nodes_that_do_not_find_each_other_both_say_so(nodes, tmp_path):
    launched = {}
    for number, (what, (second, *_)) in enumerate(WRONG.items()):
        (tmp_path / what).mkdir()
        job = Job(str(tmp_path / what), timeout=SHORT, num_nodes=3 if what == "number of nodes" else 2)
        launched[what] = with_lightning(nodes, tmp_path / what, job, PORT + number, second)
    for what, (_, *messages) in WRONG.items():
        for said, message in zip(launched[what].errors(), messages, strict=True):
            assert re.search(message, said.splitlines()[-1]), f"{what}\n{said}"


WRONG_TORCHRUN = {
    "node_rank": ({"node_rank": 0}, r"wait timeout after \d+ms, keys: .*role_info/0, .*role_info/1", "the same"),
    "port": (
        {"master_port": 29501},
        r"waiting for clients. 1/2 clients joined",
        r"timed out after \d+ms while trying to connect to \(10.77.0.1, 29501\)",
    ),
}


@pytest.mark.parametrize("what", WRONG_TORCHRUN)
def test_torchruns_that_do_not_find_each_other_both_say_so(nodes, tmp_path, what):
    options, first_message, second_message = WRONG_TORCHRUN[what]
    job, limit = Job(out=str(tmp_path)), {"rdzv_conf": f"timeout={SHORT}"}
    commands = [torchrun(nodes, node, job, **limit, **(options if node else {})) for node in (0, 1)]
    first, second = Launched(nodes, tmp_path, commands).errors()
    assert re.search(first_message, first.splitlines()[-1]), first
    assert re.search(first_message if second_message == "the same" else second_message, second.splitlines()[-1]), second


def test_nothing_is_left_of_two_nodes():
    with TwoNodes() as nodes:
        command = ["sh", "-c", "setsid sleep 300 & echo here; sleep 300"]  # one of them leaves the group of the other
        process = nodes.start(1, command, LIMIT, stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"here\n"
        namespaces = {os.stat(f"/proc/{pid}/ns/net").st_ino for pid in nodes.processes()}
        assert len(namespaces) == 1
        assert os.stat("/proc/self/ns/net").st_ino not in namespaces
    assert process.poll() is not None
    process.stdout.close()
    assert not namespaces & {os.stat(path).st_ino for path in Path("/proc").glob("[0-9]*/ns/net") if path.exists()}


def test_two_nodes_say_why_they_cannot_be_made(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RuntimeError, match=r"network namespaces need root"), TwoNodes():
        pass
    monkeypatch.setattr(shutil, "which", lambda command: None)
    with pytest.raises(RuntimeError, match=r"missing: ip, tc, .*iproute2"), TwoNodes():
        pass
