"""What ``make hooks`` has git run refuses what should not be committed, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOOKS = Path(__file__).parents[1] / ".githooks"


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.py", "x = 1\n", ""),
        ("a.md", "Kept.\n\n    +  \n", ""),
        ("a.md", "<<<<<<< ours\n", "leftover conflict marker"),
        ("a.py", "import os\n", "F401"),
        ("a.py", "x  =  1\n", "would be reformatted"),
        ("a.md", "A sentance.\n", "sentance ==> sentence"),  # codespell:ignore
    ],
)
def test_a_commit_is_looked_at(tmp_path: Path, name: str, content: str, fault: str) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    page = tmp_path / "tests" / "docs" / "test_markdown.py"
    page.parent.mkdir(parents=True)
    page.write_text("def test_pages():\n    pass\n")
    (tmp_path / name).write_text(content)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    for command in (["init", "-q"], ["add", name]):
        subprocess.run(["git", *command], cwd=tmp_path, env=environment, check=True)
    hook = subprocess.run(
        [HOOKS / "pre-commit"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (hook.returncode == 0) == (fault == "")
    assert fault in hook.stdout + hook.stderr
