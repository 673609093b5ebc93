"""The store over which the launchers of a group meet."""

from __future__ import annotations

import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.utils import store as torchrun_store
from waiting import LIMIT_S

from workers.launcher.folder_rendezvous import InterruptibleStore

AT_THE_EXIT_BARRIER = """
import signal, sys
import torch.distributed as dist
from torch.distributed.elastic.utils import store as torchrun_store
from workers.launcher.folder_rendezvous import InterruptibleStore

def told(number, frame):
    raise SystemExit(7)

signal.signal(signal.SIGTERM, told)
store = InterruptibleStore("run", dist.FileStore(sys.argv[1], 2))
print("waiting", flush=True)
torchrun_store.barrier(store, 2, "torchelastic/agent/terminal_state", barrier_timeout=3600)
"""


@pytest.fixture
def store(tmp_path: Path) -> InterruptibleStore:
    return InterruptibleStore("run", dist.FileStore(str(tmp_path / "store"), 2))  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_launcher_at_torchruns_exit_barrier_heeds_a_signal(tmp_path: Path) -> None:
    """The other launcher never comes. Torch's own store would wait on for the hour."""
    command = [sys.executable, "-c", AT_THE_EXIT_BARRIER, str(tmp_path / "store")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"waiting\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 7
        finally:
            process.kill()


def test_values_are_those_that_were_set(store: InterruptibleStore) -> None:
    store.set("one", "1")
    store.set("two", "2")
    store.wait(["one", "two"])
    assert store.get("one") == b"1"
    assert store.multi_get(["two", "one"]) == [b"2", b"1"]


@pytest.mark.parametrize("read", ["wait", "get", "multi_get"])
def test_a_value_that_nobody_sets_is_waited_for_as_long_as_the_store_says(store: InterruptibleStore, read: str) -> None:
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(dist.DistStoreError, match=r"missing not set by the others within 0\.1 s"):
        getattr(store, read)("missing" if read == "get" else ["missing"])


def test_torchruns_barrier_ends_with_its_own_error_when_others_stay_away(store: InterruptibleStore) -> None:
    with pytest.raises(dist.DistStoreError):
        torchrun_store.barrier(store, 2, "end", barrier_timeout=0.1)
