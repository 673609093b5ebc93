"""Gives torchrun a rendezvous that opens no port: the launchers of a group meet over a file in a private folder."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from service.jobs.runtime import rendezvous_folder

BACKEND = "folder"
_POLL_S = 0.02
_NO_PORT = 0
"""``MASTER_PORT`` of the ranks, whose store is a file beside that of the launchers."""


class InterruptibleStore(dist.PrefixStore):  # type: ignore[name-defined,misc]
    """Waits in Python, which handles signals meanwhile.

    Torch's stores wait outside Python, so a launcher at torchrun's exit barrier would notice a SIGTERM only after that
    barrier's five minutes.
    """

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all ``keys`` are set. Raises torch's ``DistStoreError`` after ``timeout``, or the store's own."""
        within_s = (self.timeout if timeout is None else timeout).total_seconds()
        deadline = time.monotonic() + within_s
        while not self.check(keys):
            if time.monotonic() >= deadline:
                raise dist.DistStoreError(f"{', '.join(keys)} not set by the others within {within_s:g} s")
            time.sleep(_POLL_S)

    def get(self, key: str) -> bytes:
        """Return the value of ``key`` once it is set."""
        self.wait([key])
        value: bytes = super().get(key)
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of ``keys`` once all are set."""
        self.wait(keys)
        values: list[bytes] = super().multi_get(keys)
        return values


class _FolderRendezvous(RendezvousHandler):
    """Knows hosts and their order beforehand, so there is one round, and no host joins later."""

    def __init__(self, folder: Path, host: int, hosts: int, run_id: str, address: str) -> None:
        store = dist.FileStore(str(rendezvous_folder.check(folder) / rendezvous_folder.LAUNCHERS), hosts)  # type: ignore[attr-defined]
        self._store = InterruptibleStore(run_id, store)
        self._host, self._hosts, self._run_id, self._address = host, hosts, run_id, address

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Return True, so that no rank opens a store of its own at ``MASTER_PORT``."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, self._host, self._hosts, RendezvousStoreInfo(self._address, _NO_PORT))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register() -> None:
    """Let torchrun's ``--rdzv-backend=folder`` find :class:`_FolderRendezvous`."""
    rendezvous_handler_registry.register(BACKEND, _create)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    host, address = parameters.get_as_int("host"), parameters.get("address")
    assert host is not None
    return _FolderRendezvous(Path(parameters.endpoint), host, parameters.max_nodes, parameters.run_id, str(address))
