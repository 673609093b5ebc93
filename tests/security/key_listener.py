"""What a client sends its key to: a listener that notes it, and a working folder with a key in its data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import http_receiver
import pytest
from http_receiver import Reply, Request

from service.jobs.host import ENV_PREFIX
from trivet.client import Client

SECRET = "tvt_0123456789abcdef_secret"
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@dataclass
class Listener:
    """Whatever took a port: it notes what it is sent."""

    url: str
    keys: list[str] = field(default_factory=list)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@contextmanager
def listening() -> Iterator[Listener]:
    listener = Listener("")

    def answer(request: Request) -> Reply:
        listener.keys.append(request.headers.get("authorization", ""))
        return Reply(listener.status, b'{"items": [], "next_cursor": null}', headers=listener.headers)

    with http_receiver.listening(answer) as listener.url:
        yield listener


@pytest.fixture
def listener() -> Iterator[Listener]:
    with listening() as found:
        yield found


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The working folder of somebody with an admin key in its data folder, and no settings."""
    for name in list(os.environ):
        if name.upper().startswith(ENV_PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    data = tmp_path / ".trivet"
    data.mkdir(mode=0o700)
    (data / "admin.key").write_text(SECRET + "\n")
    return tmp_path


def ask(url: str | None = None, key: str | None = None) -> None:
    with Client(url, key) as client:
        client.job_page()
