"""Started ranks, shared by all tests of a run.

Starting a rank takes long (torch, lightning, a process group), the test itself milliseconds. So a pool of processes per
world size is forked, when first asked for, from one that has imported torch, and given one task after another::

    def losses(lr):                          # in a test module, at module level: ranks import it by name
        trainer = Trainer(accelerator="cpu", devices=2, strategy=ChunkMBSStrategy(...))
        ...
        return [loss.item() for loss in model.losses]

    def test_losses():
        first, second = run_on_ranks(2, losses, 1e-3)

In a rank the default gloo group exists and the environment is torchrun's, so Lightning joins it instead of launching.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import os
import pickle
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.collectives import count_collectives as count_collectives  # wanted by most who want ranks
from tests.nursery import Nursery

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT = 180  # seconds to be forked and to join the group on a busy machine
COLLECTIVE_TIMEOUT = 60  # seconds before gloo gives up by itself
GRACE = 5.0  # seconds the other ranks get to answer once one has raised
MAX_POOLS = 2  # alive at a time; a rank that has trained holds some hundred MB


class RankFailure(AssertionError):
    """A task failed on some rank; the message has every rank's traceback and the tail of its output."""


class Returned(NamedTuple):
    value: Any


class Raised(NamedTuple):
    type_name: str
    message: str
    traceback: str


class Missing(NamedTuple):
    why: str


def run_on_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """Call ``fn(*args)`` on every rank of a group of ``world_size`` and return the results, by rank.

    ``fn`` is importable by name; ``args`` and results are pickled. Each rank starts from seed 0 and the default dtype,
    grad mode, environment and working directory.

    Raises:
        RankFailure: when any rank raised, died or did not answer within ``timeout`` seconds.

    """
    answers = _answers(world_size, fn, args, timeout)
    if any(isinstance(answer, Raised) for answer in answers):
        raise RankFailure(_report(f"{fn.__name__} failed", answers))
    return [answer.value for answer in answers]


def raises_on_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120) -> list[tuple[str, str]]:
    """Call ``fn(*args)`` as :func:`run_on_ranks` does and return (type name, message) of what each rank raised.

    Raises:
        RankFailure: when any rank returned, died or did not answer.

    """
    answers = _answers(world_size, fn, args, timeout)
    if any(isinstance(answer, Returned) for answer in answers):
        raise RankFailure(_report(f"{fn.__name__} did not raise on every rank", answers))
    return [(answer.type_name, answer.message) for answer in answers]


def stop_all() -> None:
    """End every rank."""
    while _pools:
        _pools.popitem()[1].kill()
    if the_nursery.cache_info().currsize:
        the_nursery().end()
        the_nursery.cache_clear()


# --------------------------------------------------------------------------------------------- the side of the tests

the_nursery = functools.cache(Nursery)
_pools: "OrderedDict[int, Pool]" = OrderedDict()  # least recently used first
atexit.register(stop_all)


class Pool:
    """``world_size`` processes that wait for tasks, each on a pipe of its own."""

    def __init__(self, world_size: int) -> None:
        self.processes: list[int] = []
        self.pipes: list[Connection] = []
        self._statuses: dict[int, int] = {}  # of the ranks that have ended
        self._logs = [tempfile.TemporaryFile() for _ in range(world_size)]  # noqa: SIM115  (closed by kill)
        self._log_starts = [0] * world_size
        # Hosting the store here lets the system choose the port: none is guessed that another process may take.
        self._store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        for rank in range(world_size):
            self._start(rank, world_size)
        self.collect("starting ranks", START_TIMEOUT)

    def _start(self, rank: int, world_size: int) -> None:
        ours, theirs = Pipe()
        with theirs:
            environment = _inherited() | _rank_environment(rank, world_size, self._store.port)
            process = the_nursery().start(environment, theirs.fileno(), self._logs[rank].fileno())
        self.processes.append(process)
        self.pipes.append(ours)

    def send(self, message: bytes) -> None:
        self._log_starts = [os.fstat(log.fileno()).st_size for log in self._logs]
        for pipe in self.pipes:
            # A dead rank is noticed, and reported with its output, when its answer is read.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                pipe.send_bytes(message)

    def collect(self, what: str, timeout: float) -> list[Returned | Raised]:
        """Every rank's answer; if one is missing, end the pool and say why."""
        answers = self._receive(timeout)
        hung = [rank for rank in range(len(self.pipes)) if rank not in answers]
        if hung:
            failed = [rank for rank, answer in answers.items() if not isinstance(answer, Returned)]
            why = f"{GRACE:g} s after rank {failed[0]} failed" if failed else f"after {timeout:g} s"
            self._dump_stacks(hung)
            for rank in hung:
                answers[rank] = Missing(f"had not answered {why}; killed here:\n{self.output(rank)}")
        by_rank = [answers[rank] for rank in range(len(self.pipes))]
        if any(isinstance(answer, Missing) for answer in by_rank):
            self.kill()
            raise RankFailure(_report(f"{what} failed", by_rank))
        return by_rank

    def _receive(self, timeout: float) -> "dict[int, Returned | Raised | Missing]":
        """The answers that come in time, in the order in which they come."""
        answers: dict[int, Returned | Raised | Missing] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in (self.pipes.index(pipe) for pipe in ready):
                answers[rank] = self._read(rank)
                if not isinstance(answers[rank], Returned):
                    # The others may wait for this rank in a collective and never answer.
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _read(self, rank: int) -> "Returned | Raised | Missing":
        try:
            answer = pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            return Missing(f"died (exit status {self._ended(rank)}):\n{self.output(rank)}")
        if isinstance(answer, Raised):
            return answer._replace(traceback=f"{answer.traceback}\n{self.output(rank)}")
        return answer

    def _dump_stacks(self, ranks: list[int]) -> None:
        for rank in ranks:
            os.kill(self.processes[rank], signal.SIGUSR1)
        end = time.monotonic() + 20  # a rank on a busy machine takes a while to write
        while time.monotonic() < end and any("most recent call first" not in self.output(r, 400) for r in ranks):
            time.sleep(0.05)
        time.sleep(0.5)

    def output(self, rank: int, lines: int = 60) -> str:
        """The end of what a rank has written since its last task was sent."""
        # pread, since the rank writes at the position that it shares with this file object.
        log = self._logs[rank].fileno()
        start = max(self._log_starts[rank], os.fstat(log).st_size - 100_000)
        written = os.pread(log, 100_000, start)
        return "\n".join(written.decode(errors="replace").splitlines()[-lines:])

    def _ended(self, rank: int) -> int:
        if rank not in self._statuses:
            self._statuses[rank] = the_nursery().wait(self.processes[rank])
        return self._statuses[rank]

    def kill(self) -> None:
        for rank, process in enumerate(self.processes):
            if rank not in self._statuses:  # else its id may be another's by now
                os.killpg(process, signal.SIGKILL)
                self._ended(rank)
        for file in [*self.pipes, *self._logs]:
            file.close()


def _answers(world_size: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Returned | Raised]:
    pool = _pool(world_size)
    try:
        pool.send(pickle.dumps((fn, args)))
        answers = pool.collect(fn.__name__, timeout)
        if any(isinstance(answer, Raised) for answer in answers):
            _keep_if_sound(pool)
        return answers
    except BaseException:  # an interrupt or a test's timeout too: the ranks' state is unknown
        pool.kill()
        _pools.pop(world_size, None)
        raise


def _pool(world_size: int) -> Pool:
    if world_size not in _pools:
        while len(_pools) >= MAX_POOLS:
            _pools.popitem(last=False)[1].kill()
        _pools[world_size] = Pool(world_size)
    _pools.move_to_end(world_size)
    return _pools[world_size]


def _keep_if_sound(pool: Pool) -> None:
    """Ranks that raised at different places may be out of step: only a collective that completes shows otherwise."""
    pool.send(pickle.dumps((_all_here, ())))
    try:
        sound = all(isinstance(answer, Returned) for answer in pool.collect("checking the group", GRACE * 2))
    except RankFailure:
        sound = False
    if not sound:
        pool.kill()
        _pools.pop(len(pool.pipes), None)


def _all_here() -> None:
    ones = torch.ones(1)
    dist.all_reduce(ones, async_op=True).wait(timedelta(seconds=GRACE))
    assert ones.item() == dist.get_world_size()


def _report(title: str, answers: "list[Returned | Raised | Missing]") -> str:
    parts = [title]
    for rank, answer in enumerate(answers):
        text = {Returned: "returned"}.get(type(answer)) or answer[-1]
        parts.append(f"---- rank {rank}: {text.rstrip()}")
    return "\n".join(parts)


# --------------------------------------------------------------------------------------------- the side of a rank


def _inherited() -> dict[str, str]:
    """The environment without the seed that Lightning would start each of a rank's runs from."""
    return {name: value for name, value in os.environ.items() if name not in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}


def _rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "pool",  # by which Lightning knows that it need not launch
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "POSSIBLE_USER_WARNINGS": "off",  # Lightning's advice about workers and the like
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # the machine's own name need not resolve
    return environment


def _die_with_parent() -> None:
    """A rank that hangs does not see its pipe close when the tests are killed, so a thread looks."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def serve(pipe: Connection) -> None:
    """Be a rank, of the group and number that the environment says, until the tests close ``pipe``."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _die_with_parent()
    # The groups that tests make stay, with their sockets: cached meshes and DTensor plans refer to them by name.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most_files, 16384) if most_files > 0 else 16384, most_files))
    torch.set_num_threads(1)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT)
    )
    from tests import leftovers  # imports lightning: now, so that the first task need not wait for it

    leftovers.watch()
    environment = dict(os.environ)
    modules = 0
    pipe.send_bytes(pickle.dumps(Returned("ready")))
    while True:
        if modules != len(sys.modules):
            # What was imported stays: looking through it after each task would take longer than most tasks.
            modules = len(sys.modules)
            gc.freeze()
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        _reset(environment)
        pipe.send_bytes(_answer(message))
        gc.collect()


def _reset(environment: dict[str, str]) -> None:
    """What one task may leave behind and the next must not find."""
    # Lightning puts back at the end of a run the handlers it knows of, and this one it does not.
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.chdir(ROOT)
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    random.seed(0)
    torch.manual_seed(0)


def _answer(message: bytes) -> bytes:
    from tests.leftovers import refuse_leftovers

    try:
        fn, args = pickle.loads(message)
        with warnings.catch_warnings():  # also forgets which warnings were already shown "once"
            for category in (DeprecationWarning, FutureWarning):  # as pytest's filterwarnings
                warnings.filterwarnings("error", category=category, module="lightning_chunkmbs")
            answer = pickle.dumps(Returned(fn(*args)))
        refuse_leftovers()
        return answer
    except BaseException as error:  # a SystemExit or pytest's own outcomes are answers too
        return pickle.dumps(Raised(type(error).__name__, str(error), traceback.format_exc()))
