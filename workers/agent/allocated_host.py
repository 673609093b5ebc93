"""Is one host of an allocation, for the one attempt that it was made for.

``python -m workers.agent.allocated_host LAUNCHER SETTINGS JOB SUPERVISOR...`` is what a scheduler starts on each of its
hosts. It starts a supervisor, before it imports more than that takes, and then does what
:mod:`workers.agent.allocated_part` says.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from workers.linux import die_with_parent


def main(arguments: list[str]) -> int:
    """Run until the attempt has ended here; 2 where the broker does not admit this host."""
    launcher, file, job_id, *supervisor = arguments
    os.environ.update(json.loads(Path(file).read_text()))
    if not os.environ.get("CUDA_VISIBLE_DEVICES"):  # an empty one hides the devices, of which it says nothing
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    # It stops supervisors, and Ray blocks it in all that it starts.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # The kernel ends it with this process, and the supervisor's group with that.
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
