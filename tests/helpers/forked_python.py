"""``python -m`` commands that are forked from a process which has imported the packages that most tests need.

``forked_python.py`` reads one JSON order per line, ``{"module": …, "arguments": […], "folder": …, "environment": {…},
"output": file for what it writes}``, and answers each with an exit status. It has imported nothing of this repository:
what it runs is of the folder that the order names, as if Python had been started there.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

BEFOREHAND = (
    "fastapi.testclient",
    "hypothesis.strategies",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.export._trace",
    "torch.export._unlift",
)
"""What takes long to import and starts no thread."""


class ForkedPython(AbstractContextManager["ForkedPython"]):
    """While it is entered, commands can be run one after the other, with what they write in files of a folder."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        command = [sys.executable, __file__]
        pipe = subprocess.PIPE
        self._server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=dict(environment))
        self._count = 0

    def run(self, words: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> tuple[int, str]:
        """Run ``python -m MODULE ARGUMENTS``, of which ``words`` is what follows ``-m``; return status and output."""
        self._count += 1
        output = self._folder / f"{self._count}.txt"
        module, *arguments = words
        order = {"module": module, "arguments": arguments, "folder": str(cwd), "output": str(output)}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps({**order, "environment": dict(environment)}), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline()), output.read_text()

    def __exit__(self, *given: object) -> None:
        self._server.communicate()


def serve() -> None:
    sys.path.pop(0)  # of this file
    for name in BEFOREHAND:
        importlib.import_module(name)
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert len(threads) == 1, f"a process of the threads {threads} cannot be forked safely"
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            _run_and_end(order)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run_and_end(order: dict[str, Any]) -> None:
    written = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, number in ((nothing, 0), (written, 1), (written, 2)):
        os.dup2(source, number)
    status = 1
    try:
        os.environ.clear()
        os.environ.update(order["environment"])
        os.chdir(order["folder"])
        sys.path.insert(0, order["folder"])
        sys.argv = [order["module"], *order["arguments"]]
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve()
