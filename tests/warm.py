"""Programs in processes of their own that need not import torch and Lightning, which takes seconds of each core.

``python()`` is used in place of ``sys.executable``::

    subprocess.run([python(), "-m", "tests.failing_job", "raise", "1"], env=..., cwd=...)

The program runs in a fork of the nursery, with the arguments, environment, folder, files 0 to 2 and network of the
process that was started in its place. That one passes signals on, has the program's exit status, and with it the
program ends. What the program starts as ``sys.executable`` is forked as well.

What comes with a new interpreter is not tested so: what an import needs, and what it reads from the environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000
CLIENT = Path(__file__).with_name("warm_client.py")
Program = Callable[[], Any]


def python() -> str:
    """The command that runs a script, or with -m a module, in a fork; elsewhere than on Linux, this interpreter."""
    from tests.ranks import the_nursery

    return the_nursery().python if sys.platform == "linux" else sys.executable


def write_command(folder: Path) -> str:
    """Make the command in ``folder``, in which the nursery listens at ``socket``."""
    command = folder / "python"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{CLIENT}" "{folder}/socket" "{sys.executable}" "$@"\n')
    command.chmod(0o755)
    return str(command)


# ---------------------------------------------------------------------------------------------- the side of the nursery


_supervisors: set[int] = set()  # children of the nursery, each the parent of one program


def answer(listener: socket.socket, command: str) -> Program | None:
    """Fork the program that somebody asks for; in the fork returns what is left to run."""
    _supervisors.difference_update([process for process in _supervisors if os.waitpid(process, os.WNOHANG)[0]])
    asking, _ = listener.accept()
    supervisor = os.fork()
    if supervisor:
        _supervisors.add(supervisor)
        asking.close()
        return None
    listener.close()
    os.setsid()
    return _supervised(asking, command)


def _supervised(asking: socket.socket, command: str) -> Program | None:
    length, files, *_ = socket.recv_fds(asking, 8, 4)
    asked = json.loads(asking.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL))
    process = os.fork()
    if process:
        for file in files:
            os.close(file)
        _supervise(asking, process)
        os._exit(0)
    asking.close()
    os.setsid()
    _take_on(asked, files)
    sys.executable = command
    return lambda: _run(asked["arguments"])


def _supervise(asking: socket.socket, process: int) -> None:
    """Pass on signals until the program has ended, and its status after; end it with who asked."""
    ended = os.pidfd_open(process)
    while not any(file == ended for file in select.select([ended, asking], [], [])[0]):
        numbers = asking.recv(64) or bytes([signal.SIGKILL])
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        if signal.SIGKILL in numbers:
            break
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        asking.sendall(status.to_bytes(4, "big", signed=True))


def _take_on(asked: dict[str, Any], files: list[int]) -> None:
    """Become like the process that asked."""
    *standard, network = files
    if os.fstat(network).st_ino != os.stat("/proc/self/ns/net").st_ino:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(network, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "the network of the process that asked cannot be entered")
    for number, file in enumerate(standard):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    _as_if_new()


def _as_if_new() -> None:
    """What a new interpreter finds differently in each process, or takes from its environment on import."""
    import numpy as np
    import torch
    from lightning.fabric.utilities import rank_zero

    random.seed()
    np.random.seed()
    torch.seed()
    rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in added if path and path not in sys.path]


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        sys.argv = arguments
        runpy.run_path(sys.argv[0], run_name="__main__")
