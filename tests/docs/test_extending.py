"""What the pages about extending show is the whole change: each diff applies, and its commands run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (ROOT / "docs" / "extending").glob("*.md") if path.stem != "README")
ROOMS = ("api", "benchmarks", "docs", "examples", "service", "tests", "trivet", "workers")


OF_EVERY_DAY = "kind"


def patch(diff: str, folder: Path, *options: str) -> None:
    # Unlike patch, this refuses a hunk whose length is not what its header says.
    command = ["git", "apply", *options]
    applied = subprocess.run(command, cwd=folder, input=diff, capture_output=True, text=True, check=False)
    assert applied.returncode == 0, applied.stdout + applied.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_change_that_a_page_shows_fits_the_sources(page: Path) -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", page.read_text(), re.DOTALL)
    patch(diff, ROOT, "--check")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources, to be changed, with what Python has compiled of them."""
    unwanted = shutil.ignore_patterns(".*_cache", ".trivet")
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room, ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page.stem == OF_EVERY_DAY else pytest.mark.slow(12)) for page in PAGES],
    ids=lambda page: page.stem,
)
def test_the_change_that_a_page_shows_is_the_whole_one(page: Path, copy: Path) -> None:
    text = page.read_text()
    (diff,) = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    commands = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    assert commands
    patch(diff, copy)
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("TRIVET_", "PYTEST_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in commands:
        ran = subprocess.run(
            ["bash", "-c", command],
            cwd=copy,
            # What is slow in the files that it names is no part of the change, and tried by itself.
            env={**outer, "PATH": path, "PYTHONPATH": str(copy), "PYTEST_ADDOPTS": "-m 'not slow'"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}"
