"""A program that is forked is what a new interpreter would be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PRINTS = """
import json, os, random, signal, sys, tempfile, threading, numpy, torch
line = json.dumps({
    "name": __name__, "argv": sys.argv, "shown": {n: v for n, v in os.environ.items()},
    "proc_environ": open("/proc/self/environ").read().strip("\\0"), "proc_cmdline": open("/proc/self/cmdline").read(),
    "default": [signal.getsignal(n) == signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)],
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "session": os.getsid(0) == os.getpid(), "folder": tempfile.gettempdir(), "threads": torch.get_num_threads(),
    "descriptors": [n for n in os.listdir("/proc/self/fd") if int(n) > 2 and os.path.exists(f"/proc/self/fd/{n}")],
    "draws": [random.random(), float(numpy.random.rand()), torch.rand(1).item()],
    "forked": "workers.launcher.forked_ranks" in sys.modules,
    "pid": os.getpid(), "main": threading.current_thread() is threading.main_thread(),
})
sys.stdout.write(line + "\\n")  # one write of less than PIPE_BUF: forks that share a pipe do not mix their lines
"""
PARENT = """
import json, os, signal, sys, threading, time
import numpy, torch
from workers.launcher.forked_ranks import ForkedProgram
numpy.random.seed(0)
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGINT, lambda *_: None)
kept_open = open(os.devnull)
if sys.argv[1] == "threads":
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
programs = [ForkedProgram(words, environment) for words, environment in json.loads(sys.argv[2])]
print(json.dumps([program.wait(60.0) for program in programs]), file=sys.stderr)
os._exit(0)
"""


def forked(
    *programs: tuple[list[str], dict[str, str]], threads: str = "none", room: bool = True
) -> tuple[list[int], list[str]]:
    """The exit codes and the lines that forks of one process print."""
    from service.linux import ROOM

    words = [
        ([sys.executable, "-u", *arguments], {"PATH": os.defpath} | variables) for arguments, variables in programs
    ]
    ended = subprocess.run(
        [sys.executable, "-u", "-c", PARENT, threads, json.dumps(words)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **(ROOM if room else {})},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ended.stderr.splitlines()[-1]), ended.stdout.splitlines()


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "prints.py"
    path.write_text(PRINTS)
    return str(path)


def test_a_fork_is_for_itself_and_for_others_what_its_command_would_be(script: str, tmp_path: Path) -> None:
    environment = {"RANK": "1", "TRIVET_JOB": "job_1", "OMP_NUM_THREADS": "3", "TMPDIR": str(tmp_path)}
    codes, lines = forked(([script, "word"], environment), ([script], environment))
    assert codes == [0, 0]
    first, second = sorted((json.loads(line) for line in lines), key=lambda told: -len(told["argv"]))
    assert first["forked"]
    assert first["name"] == "__main__"
    assert first["argv"] == [script, "word"]
    assert first["shown"] == {"PATH": os.defpath, **environment}
    assert set(first["proc_environ"].split("\0")) == {f"{n}={v}" for n, v in first["shown"].items()}
    assert first["proc_cmdline"].split("\0")[:2] == [sys.executable, "-u"]
    assert first["default"] == [True] * 3
    assert first["interrupt"]
    assert first["session"]
    assert first["main"]
    assert first["folder"] == str(tmp_path)
    assert first["threads"] == 3
    assert first["descriptors"] == []
    assert first["draws"][0] != second["draws"][0]
    assert first["draws"][1] != second["draws"][1]
    assert first["draws"][2] != second["draws"][2]


@pytest.mark.slow
def test_where_the_parent_has_threads_a_fork_becomes_a_new_interpreter(script: str) -> None:
    codes, lines = forked(([script], {"OPENBLAS_NUM_THREADS": "1"}), threads="threads")
    assert codes == [0]
    told: dict[str, Any] = json.loads(lines[0])
    assert not told["forked"]
    assert told["proc_cmdline"].strip("\0").split("\0") == [sys.executable, "-u", script]
    assert told["default"] == [True] * 3


def test_a_fork_ends_as_its_program_does(tmp_path: Path) -> None:
    """Modules are found as Python finds them."""
    ends = {
        "raise SystemExit(3)": 3,
        "raise SystemExit": 0,
        "raise SystemExit('no')": 1,
        "raise ValueError('no')": 1,
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
        "import os; os._exit(7)": 7,
    }
    paths = [tmp_path / f"ends-{number}.py" for number in range(len(ends))]
    for path, source in zip(paths, ends, strict=True):
        path.write_text(source)
    programs = [[str(path)] for path in paths]
    codes, _ = forked(*((words, {}) for words in [*programs, ["-m", "json.tool", "--help"], ["-m", "no.such.module"]]))
    assert codes == [*ends.values(), 0, 1]


SIGNALLED_AT_BIRTH = """
import os, signal, sys
from workers.launcher.forked_ranks import ForkedProgram
signal.signal(signal.SIGTERM, lambda *_: print("handled by the parent's handler", os.getpid(), flush=True))
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
program = ForkedProgram([sys.executable, "-u", "-m", "json.tool", "--help"], {"PATH": os.defpath})
code = program.wait(60.0)
os.kill(os.getpid(), signal.SIGTERM)
print("the fork ended with", code, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_signal_to_a_fork_that_is_not_yet_its_program_does_what_it_does_to_a_new_program() -> None:
    """The parent's handler would have a second torchrun of it; and the parent goes on to take signals."""
    ended = subprocess.run([sys.executable, "-c", SIGNALLED_AT_BIRTH], capture_output=True, text=True, check=True)
    handled, fork = ended.stdout.splitlines()
    assert handled.startswith("handled by the parent's handler")
    assert fork == f"the fork ended with {-signal.SIGTERM}"


@pytest.mark.slow
def test_without_room_a_fork_shows_what_there_is_room_for(script: str) -> None:
    codes, lines = forked(([script], {"RANK": "0", "LONG": 20_000 * "x"}), room=False)
    assert codes == [0]
    shown = json.loads(lines[0])["proc_environ"]
    assert "RANK=0" in shown
    assert "LONG" not in shown
