"""Imports torchrun before it is needed: ``python -m workers.launcher``.

Importing torch takes about as long as everything else in a start, so a supervisor starts this process at once and
sends it the request when the attempt is claimed: one JSON line on standard input, ``{"arguments": [torchrun's
arguments], "environment": {…}, "folder": working folder, "report": path, "confinement": {…}}``. It confines itself, and
so the ranks, before it starts them. Its end says how the group ended: exit code 0, or 1 with the exit codes of the
failed ranks in the file ``report``. Without a request (end of input) it exits.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service.jobs.atomic import atomic_write
from workers.launcher.confinement import Confinement
from workers.launcher.namespaces import enter_user_namespace
from workers.linux import die_with_parent

_OWN_NAMESPACES = "--own-namespaces"


def main() -> int:
    die_with_parent()
    # While this process has one thread; what a namespace is for is known only with the request.
    inside = _OWN_NAMESPACES in sys.argv and enter_user_namespace()
    # The import is what makes the process warm, so it comes before the wait.
    import torch.distributed.run as torchrun  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415

    from workers.launcher import folder_rendezvous  # noqa: PLC0415

    folder_rendezvous.register()
    request = _read_request()
    if request is None:
        return 0
    os.environ.update(request["environment"])
    Confinement.from_json(request["confinement"]).enforce(in_user_namespace=inside)
    os.chdir(request["folder"])
    try:
        run: Callable[[Any], None] = torchrun.run
        parse: Callable[[list[str]], Any] = torchrun.parse_args
        run(parse(request["arguments"]))
    except ChildFailedError as error:
        # By rank, negative for signals.
        exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        atomic_write(Path(request["report"]), json.dumps(exit_codes).encode())
        return 1
    return 0


def _read_request() -> dict[str, Any] | None:
    line = sys.stdin.readline()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return json.loads(line) if line else None
