"""What a script says of itself outside of a job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from trivet import run
run.metric(1, {"loss": 0.5}, accuracy=1)
run.progress(1, 2, "epochs")
assert not run.resumed() and not run.stopping()
(run.checkpoint_dir() / "state").write_text("x")
assert run.resumed()
run.artifact("checkpoints/state")
for bad in (lambda: run.artifact("gone"), lambda: run.metric(1, loss="much")):
    try:
        bad()
    except (FileNotFoundError, ValueError) as error:
        print(error)
print(sorted({"torch", "service", "httpx2", "pydantic"} & set(sys.modules)))
"""


def test_outside_of_a_job_reports_are_printed_and_nothing_heavy_is_imported(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines() == [
        "1: loss 0.5, accuracy 1",
        "1 of 2 epochs",
        "artifact state: checkpoints/state",
        "artifact gone: there is no such file",
        "could not convert string to float: 'much'",
        "[]",
    ], ran.stderr
