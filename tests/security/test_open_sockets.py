"""The API's open socket and its folder: strange host names, proxies that nobody named, other users."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis as redis_py
from digits import digits_job
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError
from sockets import received
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from waiting import eventually

from api.front import known_names
from api.front.middleware import is_known
from api.main import create_app
from api.server.serving import ApiServer, limited
from service.jobs.host import NotPrivateError, close_to_others
from service.jobs.settings import Settings
from service.jobs.store import Store

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture(scope="module")
def address(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """The API as it is served."""
    import uvicorn

    settings = Settings(data=tmp_path_factory.mktemp("open"), redis_url=SecretStr(broker))
    store = Store.connect(settings.broker_url, settings.layout)
    app = create_app(settings, store)
    http = limited(settings.request_head_s, settings.request_body_s, settings.response_read_s)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", http=http, ws="none")
    server, listening = ApiServer(config), config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    eventually(lambda: server.started)
    yield listening.getsockname()[:2]
    app.state.context.hub.close_soon()
    server.end()
    thread.join(300)
    store.close()


def connected(address: tuple[str, int]) -> socket.socket:
    made = socket.create_connection(address)
    made.settimeout(300)
    return made


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:8437", 200), ("127.0.0.1:1", 200), ("[::1]:8437", 200), ("192.0.2.7", 200),
        ("localhost.", 200), ("evil.example", 421), ("evil.example:8437", 421), ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example", 421), ("", 421), ("a b", 421), ("[::1].evil.example", 421),
    ],
)  # fmt: skip
def test_a_name_that_another_site_made_lead_here_is_refused(address: tuple[str, int], host: str, status: int) -> None:
    for path in ("/healthz", "/login", "/static/theme.js", "/v1/jobs"):
        with connected(address) as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            answer = received(client)
        refused = answer.startswith(b"HTTP/1.1 421 ")
        assert refused == (status == 421), (path, answer[:100])
        if refused:
            assert b"TRIVET_ALLOWED_HOSTS" in answer
            assert b"content-security-policy" in answer.lower()


def test_names_of_the_service_are_a_setting() -> None:
    settings = Settings(allowed_hosts="trivet.example.org, *.lab.example", host="0.0.0.0")
    names = known_names(settings)
    for known in ("trivet.example.org", "Trivet.Example.org:443", "a.lab.example", "a.b.lab.example:1"):
        assert is_known(known, names), known
    for unknown in ("lab.example", "xlab.example", "example.org", "a.trivet.example.org", "lab.example.evil"):
        assert not is_known(unknown, names), unknown
    assert is_known(socket.gethostname(), names)


@given(name=st.from_regex(r"[a-z0-9.:\[\]-]{0,40}", fullmatch=True))
def test_only_known_names_and_addresses_are_names(name: str) -> None:
    names = frozenset({"localhost", "*.lab.example"})
    if is_known(name, names):
        bare = re.sub(r":[0-9a-z.\[\]-]*$", "", name) if not name.startswith("[") else name
        assert (
            bare.rstrip(".") == "localhost"
            or bare.rstrip(".").endswith(".lab.example")
            or re.fullmatch(r"[0-9.]+|\[?[0-9a-f:.]*:[0-9a-f:.]*\]?.*", name)
        )


def test_only_named_proxies_are_believed(broker: str, redis: redis_py.Redis, tmp_path: Path) -> None:
    """Also one that uvicorn would not believe by itself; it says that a sign-in came from 192.0.2.1."""
    environment = {
        **os.environ, "TRIVET_DATA": str(tmp_path / "data"), "TRIVET_REDIS_URL": broker, "TRIVET_PORT": "0",
        "TRIVET_TRUSTED_PROXIES": "127.0.0.2",
    }  # fmt: skip
    log = tmp_path / "api.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "api", "--behind-proxy"], env=environment, stdout=output, stderr=output
        )
    try:
        eventually(lambda: b"startup complete" in log.read_bytes() or process.poll() is not None)
        found = re.search(r"serving (http://\S+)", log.read_text())
        assert found is not None, log.read_text()
        headers = {"X-Forwarded-For": "192.0.2.1", "X-Forwarded-Proto": "https", "X-Trivet": "1"}
        for source, taken_for in (("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "192.0.2.1")):
            with httpx2.Client(transport=httpx2.HTTPTransport(local_address=source), timeout=300) as client:
                answer = client.post(f"{found[1]}/login", data={"key": "tvt_x_y"}, headers=headers)
            assert answer.status_code == 401
            assert ("strict-transport-security" in answer.headers) == (source == "127.0.0.2")
            assert redis.delete(f"trivet:sign_ins:{taken_for}") == 1
        assert redis.keys("trivet:sign_ins:*") == []
    finally:
        process.terminate()
        process.wait(300)


@pytest.mark.parametrize(
    ("proxies", "believed"),
    [(None, True), ("127.0.0.1", True), ("127.0.0.0/8,10.0.0.1", True), ("192.0.2.9", False), (" ", False)],
)
def test_proxies_are_addresses_and_networks(proxies: str | None, believed: bool) -> None:
    settings = Settings() if proxies is None else Settings(trusted_proxies=proxies)
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["client"][0])

    scope: Any = {
        "type": "http", "client": ("127.0.0.1", 1), "scheme": "http", "headers": [(b"x-forwarded-for", b"192.0.2.1")],
    }  # fmt: skip
    unused: Any = None
    asyncio.run(ProxyHeadersMiddleware(app, settings.proxies)(scope, unused, unused))
    assert seen == ["192.0.2.1" if believed else "127.0.0.1"]


@pytest.mark.parametrize("proxies", ["*", "proxy.example", "10.0.0.1/8", "1.2.3"])
def test_what_is_no_address_of_a_proxy_is_refused(proxies: str) -> None:
    with pytest.raises(ValidationError, match="neither an address nor a network"):
        Settings(trusted_proxies=proxies)


def test_compose_names_its_proxy() -> None:
    import yaml

    compose = yaml.safe_load((Path(__file__).parents[2] / "docker-compose.yml").read_text())
    gateway = compose["networks"]["outside"]["ipam"]["config"][0]["gateway"]
    named = compose["services"]["api"]["environment"]["TRIVET_TRUSTED_PROXIES"]
    assert named == f"${{TRIVET_TRUSTED_PROXIES:-{gateway}}}"
    assert "--behind-proxy" in compose["services"]["api"]["command"]


def modes(root: Path) -> dict[str, int]:
    """What other users may do with anything below ``root`` and with itself; what goes away meanwhile is left out."""
    found = {}
    for path in [root, *root.rglob("*")]:
        with contextlib.suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if not stat.S_ISLNK(mode):
                found[str(path)] = stat.S_IMODE(mode) & 0o077
    return found


def test_a_folder_is_closed_to_others_and_stays_so(tmp_path: Path) -> None:
    fresh, old = tmp_path / "fresh", tmp_path / "old"
    old.mkdir()
    assert modes(old)[str(old)] == 0o055
    assert not close_to_others(fresh)
    assert close_to_others(old)
    assert not close_to_others(old)
    for folder in (fresh, old):
        (folder / "below").mkdir()
        (folder / "below" / "file").write_text("x")
        assert set(modes(folder).values()) == {0}


@needs_root
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    folder.chmod(0o755)
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(NotPrivateError, match=r"theirs belongs to user .*TRIVET_DATA"):
        close_to_others(folder)
    assert modes(folder)[str(folder)] == 0o055


@needs_root
@pytest.mark.parametrize("part", ["api", pytest.param("workers", marks=pytest.mark.slow)])
def test_each_part_says_so_and_does_not_start(broker: str, tmp_path: Path, part: str) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    environment = {**os.environ, "TRIVET_DATA": str(folder), "TRIVET_REDIS_URL": broker, "TRIVET_PORT": "0"}
    ran = subprocess.run([sys.executable, "-m", part], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "belongs to user" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert list(folder.iterdir()) == []


SPEC = digits_job(steps=2, checkpoint={"every": 1})


@pytest.mark.slow
@pytest.mark.distributed
def test_nothing_that_a_service_and_its_jobs_write_is_open_to_other_users(tmp_path: Path) -> None:
    from local_service import address as announced
    from local_service import said, up

    from trivet.client import Client

    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o755)
    with up(data) as process:
        announced(process, data)
        assert f"Closed {data} to other users" in said(data).read_text()
        secret = (data / "admin.key").read_text().strip()
        with Client(f"unix://{data}/api.sock", secret) as client:
            upload = tmp_path / "upload.bin"
            upload.write_bytes(b"x" * 100)
            client.upload(upload)
            job = client.wait(client.submit(SPEC).id, timeout_s=300)
            assert job.state == "succeeded", job.error
        found = modes(data)
    assert any(name.endswith("metrics.parquet") for name in found)
    assert {name: f"{mode:o}" for name, mode in found.items() if mode} == {}
