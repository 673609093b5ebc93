"""A broker of a deployment: a real server on a loopback port, with the users that Trivet writes for one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import redis
from ports import free_port
from waiting import eventually

from service.jobs.host.embedded_broker import find_server
from service.jobs.store.acl import access_list

PASSWORDS = {"api": "/#?@%:" + "a" * 32, "host": "b" * 32 + "#/%2F", "host-gpu.1": "c" * 32}
"""Two have characters to which a URL gives a meaning."""


@dataclass(frozen=True)
class NetworkBroker:
    """Where it listens, and an administrator's way in, which no user of Trivet's has."""

    port: int
    admin: redis.Redis

    def url(self, user: str) -> str:
        return f"redis://{user}:{quote(PASSWORDS[user], safe='')}@127.0.0.1:{self.port}/0"


@contextmanager
def network_broker(folder: Path, users: str | None = None) -> Iterator[NetworkBroker]:
    """Run a server with an access list, that of :data:`PASSWORDS` when absent, until the context is left."""
    rules = folder / "users.acl"
    rules.write_text((access_list(PASSWORDS) if users is None else users) + "user tester on nopass ~* &* +@all\n")
    admin = redis.Redis(unix_socket_path=str(folder / "admin.sock"), username="tester", password="any")
    process = _start(folder, rules)
    try:
        eventually(lambda: _answers(process, admin))
        port = eventually(lambda: _listens(admin))
        yield NetworkBroker(port, admin)
    finally:
        admin.close()
        process.kill()
        process.wait()


def _start(folder: Path, rules: Path) -> subprocess.Popen[bytes]:
    options = {"port": "0", "unixsocket": str(folder / "admin.sock"), "aclfile": str(rules), "dir": str(folder)}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    with (folder / "server.log").open("wb") as log:
        return subprocess.Popen([str(find_server()), *words, "--save", ""], stdout=log, stderr=log)


def _answers(process: subprocess.Popen[bytes], admin: redis.Redis) -> bool:
    assert process.poll() is None, "the server ended; see its server.log"
    try:
        return bool(admin.ping())
    except redis.ConnectionError:
        return False


def _listens(admin: redis.Redis) -> int | None:
    """Let the server listen on a port that was free just now; another process may have taken it since."""
    port = free_port()
    try:
        admin.config_set("port", port)
    except redis.ResponseError:
        return None
    return port
