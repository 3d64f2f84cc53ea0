"""One process that has imported torch and Lightning, which takes seconds, and from which the ranks are forked.

The ranks are its children, so the tests ask it to start one and to wait for one. Other processes ask it for the
programs of `warm.py`. It ends with the tests.
"""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import NoReturn

from tests import warm

ROOT = Path(__file__).resolve().parents[1]
IMPORTING = {
    "OMP_NUM_THREADS": "1",  # a fork has none of the other threads
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # to ask whether there is CUDA would start it, and it does not survive a fork
    "PYTHONUNBUFFERED": "1",
}


class Nursery:
    """The side of the tests."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="nursery-")
        self.python = warm.write_command(Path(self._folder.name))
        self._pipe, theirs = Pipe()
        with theirs, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{self._folder.name}/socket")
            listener.listen()  # here: one may connect before the nursery is ready
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.nursery", str(theirs.fileno()), str(listener.fileno()), self.python],
                cwd=ROOT,
                env=os.environ | IMPORTING | {"PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()])},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), listener.fileno()],
                start_new_session=True,  # an interrupt is for the tests
            )

    def start(self, environment: dict[str, str], pipe: int, log: int) -> int:
        """Fork a rank that is served through the file ``pipe`` and writes to the file ``log``; its process id."""
        self._pipe.send(environment)
        for file in (pipe, log):
            send_handle(self._pipe, file, self._process.pid)
        return int(self._pipe.recv())

    def wait(self, process: int) -> int:
        """The exit status of a rank, negative for a signal, when it has ended; ask once. Until then its id is its."""
        self._pipe.send(process)
        return int(self._pipe.recv())

    def end(self) -> None:
        self._pipe.close()
        self._process.wait()
        self._folder.cleanup()


def _python_path() -> list[str]:
    return list(filter(None, [os.environ.get("PYTHONPATH")]))


# ---------------------------------------------------------------------------------------------- the side of the nursery


def _raise_ranks(
    pipe: Connection, listener: socket.socket, command: str, serve: Callable[[Connection], None]
) -> warm.Program | None:
    """Until the tests end; ranks end when they see their parent gone. Returns in a fork too: with a program to run."""
    while True:
        if pipe not in wait([pipe, listener]):
            if program := warm.answer(listener, command):
                pipe.close()
                return program
            continue
        try:
            asked = pipe.recv()
        except EOFError:
            return None
        if isinstance(asked, int):
            pipe.send(os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1]))
        else:
            pipe.send(_fork(asked, pipe, serve))


def _fork(environment: dict[str, str], pipe: Connection, serve: Callable[[Connection], None]) -> int:
    tasks, log = recv_handle(pipe), recv_handle(pipe)
    process = os.fork()
    if not process:
        pipe.close()
        _become_rank(environment, tasks, log, serve)
    os.close(tasks)
    os.close(log)
    return process


def _become_rank(environment: dict[str, str], tasks: int, log: int, serve: Callable[[Connection], None]) -> NoReturn:
    status = 1
    try:
        os.setsid()  # a kill of its group reaches a rank's own children too
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        os.environ.clear()
        os.environ.update(environment)
        serve(Connection(tasks))
        status = 0
    except BaseException:  # nothing of it may come back into the nursery's loop
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def main() -> None:
    import pytest  # noqa: F401  (the modules of tests do)

    from tests import leftovers, models  # noqa: F401  (import Lightning)
    from tests.ranks import serve

    gc.collect()
    gc.freeze()  # or each rank's first collection would copy all memory
    pipe, listener = (int(number) for number in sys.argv[1:3])
    program = _raise_ranks(Connection(pipe), socket.socket(fileno=listener), sys.argv[3], serve)
    if program:
        program()


if __name__ == "__main__":
    main()
