"""Groups that tests start: none outlives its time, and the next one does not notice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest
from launching import GroupFailureError

pytestmark = pytest.mark.distributed


def outlive() -> None:
    """Ranks with a process each that is in a session of its own."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(f"processes {os.getpid()} {child.pid}", flush=True)
    time.sleep(600)


def told() -> list[str]:
    return [os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ.get("TOLD", "nothing")]


@pytest.mark.slow
@pytest.mark.waits
def test_a_group_that_outlives_its_time_is_ended_whole(torchrun: Any) -> None:
    with pytest.raises(GroupFailureError, match="still running after 15 s") as caught:
        torchrun(outlive, 2, timeout_s=15)
    processes = [int(number) for pair in re.findall(r"processes (\d+) (\d+)", caught.value.output) for number in pair]
    assert len(processes) == 4
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(process) for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert torchrun(told, 3) == [[str(rank), "3", "nothing"] for rank in range(3)]


@pytest.mark.slow
def test_ranks_have_the_environment_of_their_launch(torchrun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOLD", "now")
    assert torchrun(told, 1) == [["0", "1", "now"]]
