"""Runs torchrun once its request has come: ``python -m workers.launcher [--own-namespaces] [--preload]``, or a
fork of a process that has imported what ranks need (:func:`run_fork`).

Its supervisor starts it at once and sends it the request when the attempt is claimed: one JSON line on standard input,
``{"kind": of the job, "ranks": their number here, "arguments": [torchrun's arguments], "environment": {…}, "folder":
working folder, "report": path, "confinement": {…}}``. It confines itself, and so the ranks, before it forks them. Its
end says how the group ended: exit code 0; 1, with the exit codes of the failed ranks in the file ``report``; or the
signal that it got. Without a request (end of input) it exits.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from service.garbage import uncollected
from service.linux import ROOM, die_with_parent, present_as
from workers import forks
from workers.launcher.confinement import Confinement
from workers.launcher.namespaces import enter_user_namespace

OWN_NAMESPACES, PRELOAD = "--own-namespaces", "--preload"
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Environment in which numpy and pyarrow start no threads when they are imported."""
_NO_CUDA = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Environment in which torchrun, which looks for devices, leaves the driver alone: a process that has initialised it
cannot fork users of it.
"""


def main() -> int:
    """Import torchrun, then run the request; with ``--preload`` its ranks find what its kind names imported."""
    die_with_parent()
    # Now, while this process has one thread; the later request decides the namespaces' contents.
    inside = OWN_NAMESPACES in sys.argv and enter_user_namespace()
    return _run_requested(prepare_environment(), inside=inside, preload=PRELOAD in sys.argv)


def prepare_environment() -> dict[str, str]:
    """Change this process's environment so that imports start no threads; return the one with which it, or a fork of
    it, was started.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ROOM}
    os.environ.update(_NO_THREADS)
    return environment


def import_torchrun() -> None:
    """Import the rest of a launcher's modules, which needs :func:`prepare_environment` and bring torch."""
    with uncollected():
        import torch.distributed.run  # noqa: F401, PLC0415

        from workers.launcher import folder_rendezvous  # noqa: PLC0415

    folder_rendezvous.register()


def run_fork(environment: Mapping[str, str], *, own_namespaces: bool, preload: bool) -> int:
    """Run the request, in a fork of a process that called :func:`prepare_environment`, whose result ``environment``
    is, and that may have imported torchrun.
    """
    die_with_parent()
    inside = own_namespaces and enter_user_namespace()
    present_as([sys.executable, "-u", "-P", "-m", "workers.launcher"], environment)
    return _run_requested(dict(environment), inside=inside, preload=preload)


def _run_requested(environment: dict[str, str], *, inside: bool, preload: bool) -> int:
    import_torchrun()
    request = _read_request()
    if request is None:
        return 0
    # One rank imports as fast as this process would, and its job shows that it is there meanwhile.
    if preload and request["ranks"] > 1:
        from workers.launcher import preloading  # noqa: PLC0415 - it brings the kinds

        preloading.preload(request["kind"])
    return _run(request, environment, inside=inside)


def _run(request: Mapping[str, Any], environment: dict[str, str], *, inside: bool) -> int:
    import torch.distributed.run as torchrun  # noqa: PLC0415 - imported already; it is slow
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415

    from workers.launcher import forked_ranks  # noqa: PLC0415

    environment.update(request["environment"])
    os.environ.clear()
    os.environ.update(environment | _NO_CUDA)
    # Made here, so that no rank can replace it.
    report = os.open(request["report"], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    forked_ranks.fork_ranks(environment)
    Confinement.from_json(request["confinement"]).enforce(in_user_namespace=inside)
    os.chdir(request["folder"])
    try:
        run: Callable[[Any], None] = torchrun.run
        parse: Callable[[list[str]], Any] = torchrun.parse_args
        run(parse(request["arguments"]))
    except SignalException as caught:
        _end_by(caught.sigval)
    except ChildFailedError as error:
        # By rank, negative for signals.
        exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        os.write(report, json.dumps(exit_codes).encode())
        return 1
    return 0


def _end_by(number: signal.Signals) -> None:
    """End by a signal that torchrun passed to the ranks, now that they have ended: the exit code shows who got it
    first.
    """
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _read_request() -> dict[str, Any] | None:
    line = sys.stdin.readline()
    forks.empty_input()
    return json.loads(line) if line else None
