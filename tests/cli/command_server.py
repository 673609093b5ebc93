"""Commands as forks of a process that has imported what they need, which is most of the time that a command takes.

``python tests/cli/command_server.py`` says 0 when it is ready. Then each JSON line on its standard input, ``{"words":
[…], "environment": {…}, "folder": …, "files": [input, output, errors]}``, runs ``trivet`` once as a process of its own,
whose exit status it writes. A fork imports the modules of the command line itself: they look at the environment when
they are imported.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND_LINE = "trivet.cli"
BEFOREHAND = (
    COMMAND_LINE,
    "encodings.idna",
    "httpcore2",
    "service.jobs.kinds.listing",
    "service.jobs.kinds.registry",
    "service.jobs.store",
    "service.jobs.text.documents",
    "service.schedules",
    "trivet.client",
)


@dataclass(frozen=True)
class CommandServer:
    process: subprocess.Popen[str]

    @classmethod
    def begin(cls) -> CommandServer:
        command = [sys.executable, "-P", __file__]
        server = cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        server.answer(300)
        return server

    def run(self, **order: Any) -> int:
        assert self.process.stdin is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)
        return self.answer(300)

    def answer(self, timeout_s: float) -> int:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if ready else ""
        assert line, f"no command ended within {timeout_s} s"
        return int(line)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def serve() -> None:
    for name in BEFOREHAND:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.split(".")[:2] == COMMAND_LINE.split(".")]:
        del sys.modules[name]
    if threading.active_count() > 1 or len(list(Path("/proc/self/task").iterdir())) > 1:
        raise RuntimeError("an import has started a thread: this process cannot be forked safely")
    print(0, flush=True)
    while line := sys.stdin.readline():
        child = os.fork()
        if not child:
            _as_command(**json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _as_command(words: list[str], environment: dict[str, str], folder: str, files: list[str]) -> None:
    for number, (name, flags) in enumerate(
        zip(files, (os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_WRONLY | os.O_CREAT), strict=True)
    ):
        os.dup2(os.open(name, flags, 0o600), number)
    sys.stdin = os.fdopen(0, closefd=False)  # the other one may have read ahead
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["trivet", *words]
    code: Any = 0
    try:
        runpy.run_module("trivet", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    serve()
