"""What few jobs need is imported once no job has come for a while, and no job waits for that."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from waiting import LIMIT_S, eventually

from workers.supervisor.fork_server import READY

QUIET_S = 0.2
SERVES = f"""
import importlib, os, sys, types
from workers.supervisor import fork_server

def says(self, environment):
    os.write(0, b"%d %d" % (os.getppid() == server, "late" in sys.modules))
    return 0

fork_server._import = lambda preload: {{}}
fork_server.ForkServer._supervise = says
names = types.ModuleType("preloading")
names.preload_the_rest = lambda: importlib.import_module("late")
sys.modules["workers.launcher"] = launcher = types.ModuleType("launcher")
launcher.preloading = names
server = os.getpid()
sys.exit(fork_server.ForkServer(None, own_namespaces=False, preload=True, quiet_s={QUIET_S}).serve())
"""
LATE = """
import pathlib, threading, time
while not pathlib.Path({begins!r}).exists():
    time.sleep(0.01)
{then}
"""
STARTS_A_THREAD = "threading.Thread(target=threading.Event().wait, daemon=True).start()"


class Serving:
    """A fork server whose later imports take until a file exists."""

    def __init__(self, folder: Path, then: str) -> None:
        self.begins = folder / "begins"
        (folder / "late.py").write_text(LATE.format(begins=str(self.begins), then=then))
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([str(folder), *sys.path])
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVES], stdin=theirs.fileno(), env={**os.environ, "PYTHONPATH": path}
            )
        assert self._control.recv(len(READY)) == READY

    def fork(self) -> str:
        """Return whether the server is the parent of a new fork, and whether that has the later imports."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            ours.settimeout(LIMIT_S)
            return ours.recv(16).decode()

    def fork_after_a_while(self) -> str:
        """Do so once no fork has been wanted for a while."""
        time.sleep(2 * QUIET_S)
        return self.fork()

    def end(self) -> None:
        """Kill it; its end of the connection is then closed unless another process holds it."""
        self.process.kill()
        self.process.wait()
        with self._control:
            self._control.settimeout(LIMIT_S)
            assert self._control.recv(1) == b""


def test_no_job_waits_for_the_later_imports(tmp_path: Path) -> None:
    serving = Serving(tmp_path, "")
    assert serving.fork() == "1 0"
    eventually(lambda: serving.fork_after_a_while() == "0 0")
    serving.begins.touch()
    eventually(lambda: serving.fork() == "1 1")
    (tmp_path / "late.py").write_text("")
    assert serving.fork() == "", "the changed file is one of those that are watched"
    assert serving.process.wait(LIMIT_S) == 0
    serving.end()


def test_an_import_that_makes_a_process_unfit_for_forks_spoils_nothing(tmp_path: Path) -> None:
    serving = Serving(tmp_path, STARTS_A_THREAD)
    serving.begins.touch()
    eventually(lambda: serving.fork_after_a_while() == "0 0")
    assert serving.fork() == "0 0", "and it stays the fork without that import which serves"
    serving.end()
