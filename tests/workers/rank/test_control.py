"""What a rank hears from outside, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

LISTENS = """
import os, signal, socket, time
from workers.event_protocol import STOP, end_early, lease_until
from service.linux import uptime
from workers.rank.program import Control

ours, theirs = socket.socketpair()
control = Control(ours, lambda: os._exit(7))
{happens}
sys.exit(1 if not control.stop.wait(30) else 8 if control.ends_early == "why" else 9)
"""
HAPPENS = {
    "SIGTERM, which it reports": ("os.kill(os.getpid(), signal.SIGTERM)", 7),
    "a request to stop": ("theirs.send(STOP)", 9),
    "a request to end early, after which it still hears": ("theirs.send(end_early('why') + STOP)", 8),
    "the end of its lease": ("theirs.send(lease_until(uptime() + 0.05))", -9),
}


@pytest.mark.parametrize(("happens", "code"), HAPPENS.values(), ids=HAPPENS)
def test_a_rank_obeys(happens: str, code: int) -> None:
    script = "import sys" + LISTENS.format(happens=happens)
    assert subprocess.run([sys.executable, "-c", script], timeout=100, check=False).returncode == code
