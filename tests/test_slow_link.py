"""The benchmark of a slow link between two nodes: what it counts, and what it makes of that."""

import json
import os
import subprocess

import pytest

from examples.benchmarks.slow_link.run import bound, plot, speed_up, table
from examples.benchmarks.two_nodes import why_not
from tests.ranks import ROOT
from tests.warm import python


def row(gbit=1.0):
    variants = {"stock": (3000, 500), "ours, lockstep": (1000, 125), "compute floor": (500, 0)}  # ms, MB
    return {
        "n": 4,
        "gbit": gbit,
        "predicted": 2.5,
        "variants": {name: {"ms": ms, "sent_MB": mb} for name, (ms, mb) in variants.items()},
    }


def test_the_bound_is_that_of_a_sum_of_computing_and_sending():
    assert bound(row()) == pytest.approx((0.5 + 4.0) / (0.5 + 1.0))  # 500 MB take 4 s at 1 Gbit/s
    assert bound(row(1e6)) == pytest.approx(1, rel=1e-2)
    assert bound(row(1e-6)) == pytest.approx(4, rel=1e-2)
    assert speed_up(row()) == 3
    assert table([row()]).splitlines()[-1] == "| 1 | 4 | 3.00 (500) | 1.00 (125) | 0.50 (0) | 3.00 | 2.50 | 3.00 |"


def test_the_plot_is_drawn(tmp_path):
    plot([row(), row(5.0)], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(why_not() is not None, reason=f"two nodes cannot be made: {why_not()}")
def test_a_small_run_counts_what_the_link_carried(tmp_path):
    small = {"n": 4, "gbit": 0.05, "hidden": 128, "blocks": 3, "tokens": 8, "rounds": 1, "timeout": 250}
    small["json"] = tmp_path / "small.json"
    flags = [f"--{name}={value}" for name, value in small.items()]
    command = [python(), "-m", "examples.benchmarks.slow_link.run", *flags]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads((tmp_path / "small.json").read_text())["rows"]
    assert 0.01 < found["all_gather_gbit"] < 0.06  # a burst passes at once
    assert 3 < found["predicted"] < 4  # communication takes nearly all time, and our gathers a part of the rest
    sent = {name: result["sent_MB"] for name, result in found["variants"].items()}
    # 3 blocks of 12 · 128² parameters in fp32, and what is outside of them. A node sends its half for a gather, and all
    # for a reduce-scatter: gloo all-reduces for it.
    block, root = 12 * 128**2 * 4 / 2e6, 2 * 256 * 128 * 4 / 2e6
    once = 3 * (2 * block + 2 * block) + root + 2 * root
    assert sent["ours, lockstep"] == pytest.approx(once, rel=0.1)
    for name in ("ours, cut", "cut, checkpoint, join", "one big batch"):
        assert sent[name] == pytest.approx(once, rel=0.25)  # torch decides whether the root is gathered again
    assert sent["stock"] == pytest.approx(4 * sent["one big batch"], rel=0.1)
    assert sent["ours, lockstep"] < sent["stock, last sync only"] < sent["stock"]
    assert sent["compute floor"] < 0.05
