"""Two nodes on one Linux machine: network namespaces, joined by a link that can be slowed down or cut.

Needs root, and the commands ``ip``, ``tc`` (package iproute2), ``unshare`` and ``nsenter`` (util-linux)::

    with TwoNodes() as nodes:
        nodes.limit(1.0)
        started = [nodes.start(node, nodes.torchrun(node, "train.py"), timeout=60) for node in (0, 1)]
        nodes.set_link(up=False)

A namespace has no name: it is there as long as a process is in it. On leaving, every process in either is ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ADDRESSES = ("10.77.0.1", "10.77.0.2")  # known in the namespaces only
LINK = "link0"
PORT = 29500  # nothing else runs in the namespaces
COMMANDS = ("ip", "tc", "unshare", "nsenter", "timeout")
GRACE = 5  # seconds between the signal that asks a process to end and the one that ends it


def why_not() -> str | None:
    """Return why two nodes cannot be made here, or None when they can be."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if missing := [command for command in COMMANDS if shutil.which(command) is None]:
        return f"these commands are missing: {', '.join(missing)} (packages iproute2, util-linux, coreutils)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False, timeout=30)
    return f"a network namespace cannot be made here: {made.stderr.strip()}" if made.returncode else None


class TwoNodes:
    """Two namespaces and the link between them, from entering this context to leaving it."""

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        self._started: list[subprocess.Popen[bytes]] = []
        self._namespaces: list[int] = []  # inodes

    def __enter__(self) -> TwoNodes:
        """Make the namespaces and the link.

        Raises:
            RuntimeError: they cannot be made here; the message says why.
        """
        if reason := why_not():
            raise RuntimeError(f"Two nodes need network namespaces, but {reason}.")
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self, node: int, command: Sequence[str], timeout: float, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start ``command`` on a node; it is ended after ``timeout`` seconds, whatever becomes of this process.

        Args:
            node: 0 or 1.
            command: what to run.
            timeout: in seconds.
            env: added to this process's environment.
            options: further arguments of Popen.
        """
        limited = [*self._inside(node), "timeout", f"--kill-after={GRACE}", str(timeout), *command]
        interface = {"GLOO_SOCKET_IFNAME": LINK, "NCCL_SOCKET_IFNAME": LINK}  # the machine's own name leads elsewhere
        self._started.append(subprocess.Popen(limited, env={**os.environ, **interface, **(env or {})}, **options))
        return self._started[-1]

    def torchrun(self, node: int, *arguments: str, devices: int = 1, **options: Any) -> list[str]:
        """Return the command that starts a node's part; ``options`` are torchrun's, in place of those written here."""
        known = {"nnodes": 2, "nproc_per_node": devices, "node_rank": node}
        known |= {"master_addr": ADDRESSES[0], "master_port": PORT} | options
        flags = [f"--{name}={value}" for name, value in known.items()]
        return [sys.executable, "-m", "torch.distributed.run", *flags, *arguments]

    def set_link(self, up: bool) -> None:
        """Cut the link, or mend it."""
        for node in (0, 1):
            self._ip(node, "link", "set", LINK, "up" if up else "down")

    def limit(self, gbit: float | None) -> None:
        """Let a node send at most this many 10^9 bits per second; None for no limit."""
        for node in (0, 1):
            subprocess.run([*self._inside(node), *shaping(gbit)], check=True, timeout=30)

    def processes(self) -> list[int]:
        """Return the ids of all processes on the nodes."""
        holders = {holder.pid for holder in self._holders}
        return [pid for pid in _processes() if pid not in holders and _namespace(pid) in self._namespaces]

    def close(self) -> None:
        """End every process on the nodes, and with the last of them the namespaces."""
        for process in self._started:  # one that has just been started may not be in its namespace yet
            process.kill()
            process.wait()
        end = time.monotonic() + 30
        while (left := self.processes()) and time.monotonic() < end:  # a process may start others while these end
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for holder in self._holders:
            holder.kill()
            holder.wait()
        self._holders.clear()
        self._namespaces.clear()

    def _make(self) -> None:
        for _ in (0, 1):
            # It ends with this process too: then its input is closed.
            holding = ["unshare", "--net", "sh", "-c", "echo; exec cat > /dev/null"]
            holder = subprocess.Popen(holding, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._holders.append(holder)
            if holder.stdout is None or not holder.stdout.readline():
                raise RuntimeError(f"{' '.join(holding)} failed with status {holder.wait()}.")
            self._namespaces.append(_namespace(holder.pid) or 0)
        # A pair that is made outside and moved in would be seen by the whole machine for a moment.
        other_end = ("peer", "name", LINK, "netns", str(self._holders[1].pid))
        self._ip(0, "link", "add", LINK, "type", "veth", *other_end)
        for node, address in enumerate(ADDRESSES):
            self._ip(node, "address", "add", f"{address}/24", "dev", LINK)
            self._ip(node, "link", "set", "lo", "up")
        self.set_link(up=True)

    def _ip(self, node: int, *arguments: str) -> None:
        subprocess.run([*self._inside(node), "ip", *arguments], check=True, timeout=30)

    def _inside(self, node: int) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._holders[node].pid}/ns/net"]


def shaping(gbit: float | None) -> list[str]:
    """Return the command that limits what the node it runs on sends; None takes the limit away."""
    queue = ["tc", "qdisc", "replace", "dev", LINK, "root"]
    if gbit is None:
        return [*queue, "pfifo"]
    burst = max(128_000, int(gbit * 1e9 / 8 * 1e-3))  # bytes: a millisecond, and no less than the largest packet takes
    return [*queue, "tbf", "rate", f"{gbit * 1e3:g}mbit", "burst", str(burst), "latency", "50ms"]


def sent_bytes() -> int:
    """Return how many bytes the node that this process is on has sent over the link, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == LINK:
            return int(counters.split()[8])
    raise RuntimeError(f"This process is on neither of two nodes: it has no network interface {LINK!r}.")


def _processes() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _namespace(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:  # it has ended
        return None
