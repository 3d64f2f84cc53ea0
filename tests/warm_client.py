"""What ``warm.python`` runs: has a program run in a fork of the nursery, and is as if it were that program.

Imports little, since this is what a start costs: ``warm_client.py ADDRESS PYTHON ARGUMENTS``.
"""

import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def can_be_forked(arguments: list[str]) -> bool:
    """Whether a script or a module is to be run, without options other than -u."""
    return bool(arguments) and (arguments[0] == "-m" or not arguments[0].startswith("-"))


def run(address: str, arguments: list[str]) -> int:
    """The exit status of the program, negative for a signal."""
    asked = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    message = json.dumps(asked).encode()
    with socket.socket(socket.AF_UNIX) as nursery:
        nursery.connect(address)
        network = os.open("/proc/self/ns/net", os.O_RDONLY)
        socket.send_fds(nursery, [len(message).to_bytes(8, "big")], [0, 1, 2, network])
        nursery.sendall(message)
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: nursery.send(bytes([number])))
        answer = nursery.recv(4)
    return int.from_bytes(answer, "big", signed=True) if answer else -signal.SIGKILL


def main(address: str, python: str, arguments: list[str]) -> None:
    if arguments[:1] == ["-u"]:  # the nursery's output is never held back
        arguments = arguments[1:]
    if not can_be_forked(arguments):
        os.execv(python, [python, *arguments])
    status = run(address, arguments)
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
