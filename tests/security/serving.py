"""A real API server over a real broker, for attacks on its open socket, and its checks of uploaded files alone."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
from served_app import served

from api.main import create_app
from api.offload import Checker, CheckerSettings
from service.jobs.checks.dependencies import files_of
from service.jobs.files import DataLayout
from service.jobs.kinds.registry import spec_adapter
from service.jobs.records import Problem, Rejected
from service.jobs.settings import Settings
from service.jobs.store import Store
from service.jobs.submission.request import CheckRequest

PATIENT = CheckerSettings(clock_ratio=1000)
"""Where other work has the processors, a second of processor time takes many by the clock."""


@dataclass(frozen=True)
class Service:
    """A server and its store; what its clients ask, they ask over the socket."""

    url: str
    settings: Settings
    store: Store

    def client(self, owner: str) -> httpx2.Client:
        """A client with a key of its own that may submit."""
        secret = self.store.keys.create(owner, ["submit"])[1]
        return httpx2.Client(base_url=self.url, headers={"Authorization": f"Bearer {secret}"}, timeout=300.0)


@contextmanager
def serving(settings: Settings) -> Iterator[Service]:
    """The API of these settings on a free port of the loopback."""
    store = Store.connect(settings.broker_url, settings.layout, settings.store_limits)
    with closing(store), served(create_app(settings, store)) as (url, _):
        yield Service(url, settings, store)


MLP = {"family": "mlp", "in_features": 1, "hidden": [4], "out_features": 1}


def asking(file_id: str) -> dict[str, Any]:
    """A job about the query in an uploaded file."""
    return {"kind": "verify", "model": MLP, "property": {"vnnlib": file_id}}


def stored(layout: DataLayout, content: bytes) -> str:
    """The id of a file that is put where uploads are kept."""
    file_id = f"file_{hashlib.sha256(content).hexdigest()}"
    path = layout.file(file_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return file_id


def request(layout: DataLayout, file_id: str, **fields: Any) -> CheckRequest:
    """The check of a job about the file, or of one with other ``fields``."""
    spec = spec_adapter.validate_python({**asking(file_id), **fields})
    named = {file for _, file in files_of(spec)}
    return CheckRequest.of({"": spec}, None, lambda _: None, lambda _: None, layout, uploads=named)


def problems(layout: DataLayout, file_id: str, memory: float, seconds: int, **fields: Any) -> list[Problem]:
    """Those of one check within limits, by a checker of its own; also those that say which limit was passed."""

    async def checked() -> list[Problem]:
        checker = Checker(Settings(check_memory_gib=memory, check_seconds=seconds), PATIENT)
        try:
            return await checker.problems(request(layout, file_id, **fields), "ada")
        except Rejected as rejected:
            return rejected.problems
        finally:
            await checker.stop()

    return asyncio.run(checked())
