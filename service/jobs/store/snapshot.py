"""Lets the running embedded broker write a snapshot of one moment to a file."""

from __future__ import annotations

import time
from pathlib import Path

import redis

from service.jobs.store.client import BrokerClient, StoreUnavailable

_FILE = "dump.rdb"
_POLL_S = 0.05
_WITHIN_S = 3600.0


def write_snapshot(client: BrokerClient, folder: Path) -> Path:
    """Return the file, in the broker's ``folder``; the caller deletes it. Raises :class:`StoreUnavailable` if
    the broker fails to write it.
    """
    deadline = time.monotonic() + _WITHIN_S
    while not _begin(client):
        _wait(deadline)
    while (info := client.call("INFO", "persistence"))["rdb_bgsave_in_progress"]:
        _wait(deadline)
    path = folder / _FILE
    if info["rdb_last_bgsave_status"] != "ok" or not path.is_file():
        raise StoreUnavailable(f"the broker could not write a snapshot to {folder}; its log is there")
    return path


def _begin(client: BrokerClient) -> bool:
    """Return whether a snapshot has begun: the server makes one at a time, and none while it rewrites its file."""
    try:
        client.call("BGSAVE")
    except redis.ResponseError as error:
        if "in progress" not in str(error):
            raise
        return False
    return True


def _wait(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise StoreUnavailable("the broker did not write a snapshot in time")
    time.sleep(_POLL_S)


def put_in_place(snapshot: Path, folder: Path) -> None:
    """Make a snapshot the first part of the append-only file of a server that is to start in ``folder``."""
    parts = folder / "appendonlydir"
    parts.mkdir(parents=True)
    snapshot.replace(parts / "appendonly.aof.1.base.rdb")
    (parts / "appendonly.aof.manifest").write_text("file appendonly.aof.1.base.rdb seq 1 type b\n")
