"""What the pages about extending show is the whole change: each diff applies, and its commands run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_python import ForkedPython
from launching import NVIDIA
from pages import ROOT, commands

PAGES = sorted(path for path in (ROOT / "docs" / "extending").glob("*.md") if path.stem != "README")
ROOMS = ("api", "benchmarks", "docs", "examples", "service", "tests", "trivet", "workers")


OF_EVERY_DAY = "kind"


def diff_of(page: Path) -> str:
    (diff,) = re.findall(r"```diff\n(.*?)```", page.read_text(), re.DOTALL)
    return str(diff)


def patch(diff: str, folder: Path, *options: str) -> None:
    # Unlike patch, this refuses a hunk whose length is not what its header says.
    command = ["git", "apply", *options]
    applied = subprocess.run(command, cwd=folder, input=diff, capture_output=True, text=True, check=False)
    assert applied.returncode == 0, applied.stdout + applied.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_change_that_a_page_shows_fits_the_sources(page: Path) -> None:
    patch(diff_of(page), ROOT, "--check")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources, to be changed, with what Python has compiled of them."""
    unwanted = shutil.ignore_patterns(".*_cache", ".trivet")
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room, ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("TRIVET_", "PYTEST_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # What is slow in the files that a command names is no part of the change, and tried by itself.
    return {**outer, "PATH": path, "PYTEST_ADDOPTS": "-m 'not slow'"}


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Iterator[ForkedPython]:
    with ForkedPython(tmp_path_factory.mktemp("commands"), environment) as python:
        yield python


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page.stem == OF_EVERY_DAY else pytest.mark.slow(8)) for page in PAGES],
    ids=lambda page: page.stem,
)
def test_the_change_that_a_page_shows_is_the_whole_one(
    page: Path, copy: Path, environment: dict[str, str], request: pytest.FixtureRequest
) -> None:
    assert commands(page)
    patch(diff_of(page), copy)
    own = {**environment, "PYTHONPATH": str(copy)}
    can_fork = page.stem != OF_EVERY_DAY and not NVIDIA.exists()
    for command in commands(page):
        words = shlex.split(command)
        if can_fork and words[:2] == ["python", "-m"]:
            status, printed = request.getfixturevalue("forked").run(words[2:], copy, own)
        else:
            ran = subprocess.run(
                ["bash", "-c", command], cwd=copy, env=own, capture_output=True, text=True, check=False
            )
            status, printed = ran.returncode, ran.stdout + ran.stderr
        assert status == 0, f"{command}\n{printed}"
