"""Real groups of ranks on gloo, for the tests of any room.

``torchrun`` forks ranks from a process that imported what they need (``rank_server.py``), which saves each of them
seconds; ``fresh_torchrun`` is torchrun itself, where a rank must be an interpreter of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import psutil
import pytest

from service.linux import ROOM

ROOT = Path(__file__).parents[2]
HELPERS = Path(__file__).parent
RANK_MAIN, RANK_SERVER = HELPERS / "rank_main.py", HELPERS / "rank_server.py"
NVIDIA = Path("/dev/nvidiactl")
"""Where it is, imports start threads, and a process that has some cannot be forked."""
OF_TESTS = ("PYTEST_CURRENT_TEST", "CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_CACHE_DIR", "TORCH_WARM_POOL")
"""Variables that tests, or what they call, set in their own process, and that no rank needs."""
LIMIT_SECONDS = 600.0
"""A group, or the import of a server, takes so long only if something is broken, on however busy a machine."""


class GroupFailureError(AssertionError):
    """A rank ended with an error, or the group outlived its time; ``output`` holds what all ranks wrote."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(f"{message}\n{output[-8000:]}")
        self.output = output


@dataclass(frozen=True)
class Torchrun:
    """Call it with a module-level function of the test module: each rank runs it and returns something JSON can hold.

    The function imports what it needs from ``service`` and starts the group itself
    (``service.parallel.distributed.start("cpu")``). Results come back in rank order. ``start`` runs a group to its
    end: of so many ranks, with these arguments for ``rank_main``, for so many seconds, writing to this file.
    """

    folder: Path
    start: Callable[[int, list[str], float, Path], int]

    def __call__(
        self, function: Callable[..., Any], ranks: int, timeout_s: float = LIMIT_SECONDS, **arguments: Any
    ) -> list[Any]:
        results = self.folder / f"{function.__name__}-{len(list(self.folder.iterdir()))}"
        results.mkdir()
        call = [function.__code__.co_filename, function.__name__, json.dumps(arguments), str(results)]
        written = results / "output.txt"
        written.touch()
        try:
            status = self.start(ranks, call, timeout_s, written)
        except TimeoutError:
            message = f"the group was still running after {timeout_s} s"
            raise GroupFailureError(message, written.read_text(errors="replace")) from None
        if status:
            raise GroupFailureError(f"the group ended with exit status {status}", written.read_text(errors="replace"))
        files = [results / f"{rank}.json" for rank in range(ranks)]
        if not all(file.exists() for file in files):
            raise GroupFailureError("not every rank left a result", written.read_text(errors="replace"))
        return [json.loads(file.read_text()) for file in files]


def _environment() -> dict[str, str]:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HELPERS), os.environ.get("PYTHONPATH", "")]),
    }
    for name in OF_TESTS:
        environment.pop(name, None)
    return environment


def _start_fresh(ranks: int, call: list[str], timeout_s: float, output: Path) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    # An endpoint of our own with port 0: the system picks the port, so parallel tests never meet.
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    with output.open("w") as file:
        process = subprocess.Popen(
            [*command, str(RANK_MAIN), *call], env=_environment(), stdout=file, stderr=subprocess.STDOUT
        )
    try:
        return process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    finally:
        _kill_with_descendants(process)


@dataclass(frozen=True)
class RankServer:
    """A process that forks groups, with the environment and working folder that a launch of now would have."""

    process: psutil.Process
    orders: TextIO
    answers: TextIO
    environment: dict[str, str]
    folder: str
    log: Path

    def runs(self) -> bool:
        try:
            return self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def is_as_now(self) -> bool:
        return self.runs() and (self.environment, self.folder) == (_environment(), str(Path.cwd()))

    def answer(self, timeout_s: float) -> int:
        ready, _, _ = select.select([self.answers], [], [], timeout_s)
        if not ready:
            raise TimeoutError
        line = self.answers.readline()
        if not line:
            raise GroupFailureError("the server of ranks ended", self.log.read_text(errors="replace"))
        return int(line)

    def run(self, ranks: int, call: list[str], timeout_s: float, output: Path) -> int:
        """The exit status of a group. A group that outlives its time is killed; what else ends this ends the server."""
        order = json.dumps({"ranks": ranks, "call": call, "output": str(output)})
        try:
            print(order, file=self.orders, flush=True)
            return self.answer(timeout_s)
        except TimeoutError:
            _kill(self.process.children(recursive=True))
            self.answer(LIMIT_SECONDS)
            raise
        except BaseException:
            self.end()
            raise

    def order(self, **order: Any) -> None:
        """Have it start something that nobody waits for."""
        print(json.dumps(order), file=self.orders, flush=True)

    def end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            _kill([self.process, *self.process.children(recursive=True)])
            self.process.wait()


@dataclass(frozen=True)
class StartingServers:
    """A process that imports what ranks need and is then forked into servers, each for a process that runs tests."""

    process: subprocess.Popen[bytes]
    ends: list[tuple[int, int]]
    """Of each server: where it takes orders, and where it answers."""
    environment: dict[str, str]
    folder: str
    log: Path

    @classmethod
    def start(cls, count: int, log: Path) -> StartingServers:
        ours, theirs = [], []
        for _ in range(count):
            (order_read, order_write), (answer_read, answer_write) = os.pipe(), os.pipe()
            ours.append((order_write, answer_read))
            theirs += [order_read, answer_write]
        environment = _environment()
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-u", str(RANK_SERVER), 1024 * ".", *map(str, theirs)],
                env=environment | ROOM,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                pass_fds=theirs,
                start_new_session=True,
            )
        for end in theirs:
            os.close(end)
        return cls(process, ours, environment, str(Path.cwd()), log)

    def server(self, number: int) -> RankServer:
        """One of the servers, once it is ready."""
        write, read = self.ends[number]
        main = psutil.Process(self.process.pid)
        unready = RankServer(main, os.fdopen(write, "w"), os.fdopen(read), self.environment, self.folder, self.log)
        try:
            return replace(unready, process=psutil.Process(unready.answer(LIMIT_SECONDS)))
        except BaseException:
            unready.end()
            raise


def _kill_with_descendants(process: subprocess.Popen[Any]) -> None:
    """Ranks are in sessions of their own, so the launcher's end alone would leave them behind."""
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(process.pid)
        _kill([launcher, *launcher.children(recursive=True)])
    process.wait()


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@dataclass
class RankServers:
    """The server of a test process; another one where a test has changed the environment or the working folder."""

    folder: Path
    current: RankServer | None = None

    def run(self, ranks: int, call: list[str], timeout_s: float, output: Path) -> int:
        server = self.any()
        if not server.is_as_now():
            server = self._another()
        return server.run(ranks, call, timeout_s, output)

    def any(self) -> RankServer:
        """One that runs, whatever its environment and folder."""
        if self.current is None and _inherited is not None:
            starting, number = _inherited
            self.current = starting.server(number)
        return self.current if self.current is not None and self.current.runs() else self._another()

    def _another(self) -> RankServer:
        self.end()
        self.current = StartingServers.start(1, self.folder / "server.txt").server(0)
        return self.current

    def end(self) -> None:
        if self.current is not None:
            self.current.end()


_inherited: tuple[StartingServers, int] | None = None


def inherit(starting: StartingServers, number: int) -> None:
    """Let ranks of this process be forked by a server that its parent started."""
    global _inherited  # noqa: PLW0603 - what a forked process begins with
    _inherited = starting, number


@pytest.fixture(scope="session")
def rank_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServers]:
    servers = RankServers(tmp_path_factory.mktemp("rank-servers"))
    yield servers
    servers.end()


@pytest.fixture(scope="session")
def torchrun(tmp_path_factory: pytest.TempPathFactory, rank_servers: RankServers) -> Torchrun:
    folder = tmp_path_factory.mktemp("torchrun")
    return Torchrun(folder, _start_fresh if NVIDIA.exists() else rank_servers.run)


@pytest.fixture(scope="session")
def fresh_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Torchrun:
    return Torchrun(tmp_path_factory.mktemp("fresh-torchrun"), _start_fresh)
