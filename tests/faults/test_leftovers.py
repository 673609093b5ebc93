"""What a killed supervisor leaves in the temporary folder goes away; what is in use stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.jobs.files import DataLayout
from service.jobs.host import Process
from workers.supervisor import group
from workers.supervisor.group import Group, remove_leftovers

_SUPERVISOR = """
import os, sys
from workers.supervisor.group import Group
print(Group(dict(os.environ)).folder, flush=True)
sys.stdin.read()
"""


def test_the_scratch_folder_of_a_killed_supervisor_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = tmp_path / "t"
    short.mkdir()
    monkeypatch.setenv("TMPDIR", str(short))
    monkeypatch.setattr("tempfile.tempdir", None)
    supervisor = subprocess.Popen(
        [sys.executable, "-c", _SUPERVISOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert supervisor.stdout is not None
    left = Path(supervisor.stdout.readline().strip())
    kept = Group({})
    try:
        assert left not in remove_leftovers()
        supervisor.kill()
        supervisor.wait()
        assert left in remove_leftovers()
        assert not left.exists()
        monkeypatch.setattr(group, "_SHORT", str(short))
        monkeypatch.setattr(Process, "alive", False)  # as seen from another container with the same /tmp
        assert remove_leftovers() == []
        assert kept.folder.exists()
    finally:
        kept.close()


def test_a_host_of_an_allocation_which_has_no_worker_deletes_them_itself(
    broker: str, data: DataLayout, tmp_path: Path
) -> None:
    left, settings = tmp_path / "trivet-group-1.0-x", tmp_path / "settings.json"
    left.mkdir()
    settings.write_text(json.dumps({"TRIVET_DATA": str(data.root), "TRIVET_REDIS_URL": broker}))
    allocated = {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "1"}
    command = [sys.executable, "-P", "-m", "workers.agent.allocated_host", "slurm", str(settings), "job_gone", "cat"]
    subprocess.run(command, env={**os.environ, **allocated, "TMPDIR": str(tmp_path)}, check=True)
    assert not left.exists()
