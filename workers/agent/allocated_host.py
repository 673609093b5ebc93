"""Runs on one host of an allocation, for the one attempt that the allocation was made for.

``python -m workers.agent.allocated_host LAUNCHER SETTINGS JOB SUPERVISOR...`` runs on each of a scheduler's
hosts. It starts a supervisor before it imports anything else, and then runs
:mod:`workers.agent.allocated_part`.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from service.linux import die_with_parent


def main(arguments: list[str]) -> int:
    """Run until the attempt has ended here; return 2 if the broker refuses this host."""
    launcher, file, job_id, *supervisor = arguments
    os.environ.update(json.loads(Path(file).read_text()))
    if not os.environ.get("CUDA_VISIBLE_DEVICES"):  # an empty one hides all devices
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    # This signal stops supervisors, and Ray blocks it in every process that it starts.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # The kernel ends the supervisor with this process, and the group with its supervisor.
    started = subprocess.Popen(
        supervisor,
        stdin=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - there are no threads yet
    )
    part = importlib.import_module("workers.agent.allocated_part")  # it takes a second, in which the other imports too
    return int(part.run(launcher, job_id, started))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
