"""What a killed supervisor leaves in the temporary folder goes away; what is in use stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
        assert kept.folder.exists()
    finally:
        kept.close()
