"""A failure counts if it happens twice: beside the other tests, and then alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import NVIDIA

RUN = Path(__file__).parent / "run.py"
TESTS = """
from pathlib import Path
import pytest

def test_sound(): pass

def test_skipped(): pytest.skip("for this reason")

def test_only_beside_others():
    seen = Path(__file__).with_name("seen")
    first = not seen.exists()
    seen.touch()
    assert not first

@pytest.fixture
def torn_down():
    yield
    seen = Path(__file__).with_name("torn down")
    first = not seen.exists()
    seen.touch()
    assert not first

def test_fixture(torn_down): pass
"""
forks_the_tests = pytest.mark.skipif(
    NVIDIA.exists(), reason="on a host with NVIDIA's driver pytest-xdist runs the tests, in its own order"
)
BROKEN = "\ndef test_always(): assert False\n"


def run(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_these.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:schemathesis -p no:hypothesispytest\n")
    command = [sys.executable, str(RUN), "--processes", "2", "-ra", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_what_passes_alone_is_named_as_flaky_and_does_not_fail_the_run(tmp_path: Path) -> None:
    ended = run(tmp_path, TESTS)
    assert ended.returncode == 0, ended.stdout
    assert "SKIPPED [1] test_these.py:7: for this reason" in ended.stdout
    assert ended.stdout.splitlines()[-3:] == [
        "0 failed twice, 2 flaky (failed beside others, passed alone)",
        "FLAKY test_these.py::test_only_beside_others",
        "FLAKY test_these.py::test_fixture",
    ]


def test_what_fails_twice_fails_the_run(tmp_path: Path) -> None:
    ended = run(tmp_path, TESTS + BROKEN)
    assert ended.returncode == 1
    assert ended.stdout.count("\nfailed: test_these.py::test_always: ") == 1
    assert ended.stdout.splitlines()[-4:] == [
        "1 failed twice, 2 flaky (failed beside others, passed alone)",
        "FAILED TWICE test_these.py::test_always",
        "FLAKY test_these.py::test_only_beside_others",
        "FLAKY test_these.py::test_fixture",
    ]


@forks_the_tests
def test_a_test_that_ends_its_process_has_failed_and_the_others_of_its_file_are_run(tmp_path: Path) -> None:
    ended = run(tmp_path, "import os\ndef test_ends(): os._exit(3)\ndef test_sound(): pass\n")
    assert ended.returncode == 1
    assert "1 failed, 1 passed" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "FAILED TWICE test_these.py::test_ends"


@pytest.mark.slow
def test_what_the_session_needs_is_made_once_by_each_process_and_taken_down(tmp_path: Path) -> None:
    fixtures = """
import os, pytest
@pytest.fixture(scope="session")
def kept():
    yield os.getpid()
    print(os.getpid(), file=open("taken down", "a"))
"""
    (tmp_path / "conftest.py").write_text(fixtures)
    text = """
import os
def test_one(kept): print(kept, file=open("made", "a"))
def test_two(kept): assert kept == os.getpid()
"""
    for number in range(8):
        (tmp_path / f"test_{number}.py").write_text(text)
    assert "18 passed" in run(tmp_path, text).stdout
    made, taken_down = ((tmp_path / name).read_text().split() for name in ("made", "taken down"))
    assert len(made) == 9
    assert sorted(set(made)) == sorted(taken_down)


@pytest.mark.slow
@forks_the_tests
def test_files_that_say_they_take_long_come_first_and_the_next_time_those_that_did(tmp_path: Path) -> None:
    (tmp_path / "test_said.py").write_text("import pytest\n@pytest.mark.slow(9)\ndef test_quick(): pass\n")
    (tmp_path / "test_group.py").write_text("import pytest\n@pytest.mark.distributed\ndef test_quick(): pass\n")
    (tmp_path / "test_tough.py").write_text("import time\ndef test_slow(): time.sleep(0.5)\n")
    ended = [run(tmp_path, "def test_quick(): pass\n", "--processes", "1", "-v").stdout for _ in range(2)]
    first, then = (re.findall(r"^(\w+)\.py::\w+ PASSED", each, re.MULTILINE) for each in ended)
    assert first == ["test_said", "test_group", "test_these", "test_tough"], ended[0]
    assert then[0] == "test_tough", ended[1]  # the others took no time, or a hundredth of a second


@forks_the_tests
def test_tests_that_wait_are_run_beside_the_others(tmp_path: Path) -> None:
    text = """
import time
from pathlib import Path
import pytest
def test_goes_on_when_the_other_has_run():
    until = time.monotonic() + 60
    while not Path("waited").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
@pytest.mark.waits
def test_waits(): Path("waited").touch()
"""
    assert "2 passed" in run(tmp_path, text, "--processes", "1").stdout


@pytest.mark.slow
def test_a_file_that_cannot_be_imported_fails_the_run(tmp_path: Path) -> None:
    assert run(tmp_path, "import nothing_of_this_name\n").returncode != 0
