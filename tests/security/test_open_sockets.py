"""The API's open socket and its folder: slow clients, strange host names, proxies that nobody named, other users."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis as redis_py
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError
from waiting import eventually

from api.main import create_app
from api.middleware import is_known, known_names
from api.serving import LEAST_BODY, LONGEST_HEAD, ApiServer, limited
from service.jobs.private import NotPrivateError, close_to_others
from service.jobs.settings import Settings
from service.jobs.store import Store

HEAD_S, BODY_S = 1.0, 4.0
HALF = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Le"
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture(scope="module")
def address(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int, Store]]:
    """The API as it is served, with short limits."""
    import uvicorn

    settings = Settings(data=tmp_path_factory.mktemp("open"), redis_url=SecretStr(broker))
    store = Store.connect(settings.broker_url, settings.layout)
    app = create_app(settings, store)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", http=limited(HEAD_S, BODY_S), ws="none")
    server, listening = ApiServer(config), config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    eventually(lambda: server.started)
    yield *listening.getsockname()[:2], store
    app.state.context.hub.close_soon()
    server.should_exit = True
    thread.join(300)
    store.close()


def connected(address: tuple[str, int, Store]) -> socket.socket:
    made = socket.create_connection(address[:2])
    made.settimeout(300)
    return made


def received(client: socket.socket) -> bytes:
    """All that the server sends until it closes the connection."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def test_b7_two_hundred_half_open_requests_do_not_stop_the_api_and_are_ended(address: tuple[str, int, Store]) -> None:
    url = f"http://127.0.0.1:{address[1]}/healthz"
    with ExitStack() as held:
        half_open = [held.enter_context(connected(address)) for _ in range(200)]
        for client in half_open[:150]:
            client.sendall(HALF)
        assert httpx2.get(url, timeout=300).status_code == 200
        answers = [received(client) for client in half_open]
    assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers[:150])
    assert answers[150:] == [b""] * 50, "those that sent nothing are told nothing"
    assert httpx2.get(url, timeout=300).status_code == 200


def test_b7_a_head_that_comes_byte_by_byte_has_the_same_time(address: tuple[str, int, Store]) -> None:
    sent = 0
    with connected(address) as client, contextlib.suppress(OSError):
        client.settimeout(HEAD_S / 10)
        for byte in HALF * 100:
            client.sendall(bytes([byte]))
            sent += 1
            with contextlib.suppress(TimeoutError):
                assert client.recv(4096).startswith(b"HTTP/1.1 408 ")
                break
    assert 0 < sent < len(HALF * 100)


def test_b7_a_head_without_end_is_refused(address: tuple[str, int, Store]) -> None:
    with connected(address) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        try:
            for index in range(2 * LONGEST_HEAD // 1000):
                client.sendall(b"X-%d: %b\r\n" % (index, b"x" * 990))
        except OSError:
            pass
        answer = received(client)
    assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""


def upload(address: tuple[str, int, Store], length: int) -> bytes:
    secret = address[2].keys.create("ann", ["submit"])[1]
    return (
        f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {secret}\r\nConnection: close\r\n"
        f"Content-Type: application/octet-stream\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def test_b7_a_body_that_stops_ends_its_connection(address: tuple[str, int, Store], redis: redis_py.Redis) -> None:
    with connected(address) as client:
        client.sendall(upload(address, 10 * LEAST_BODY) + b"x" * 100)
        assert received(client) == b""
    files = list(address[2].files.data.files.rglob("*"))
    eventually(lambda: not [path for path in files if path.is_file() and path.exists()])


def test_b7_a_body_that_keeps_coming_may_take_its_time(address: tuple[str, int, Store], redis: redis_py.Redis) -> None:
    pieces = 10
    with connected(address) as client:
        client.sendall(upload(address, pieces * 2 * LEAST_BODY))
        for _ in range(pieces):
            client.sendall(b"x" * 2 * LEAST_BODY)
            time.sleep(BODY_S / 8)
        assert received(client).startswith(b"HTTP/1.1 201 ")


def test_b7_a_connection_serves_several_requests_and_may_rest_between_them(address: tuple[str, int, Store]) -> None:
    with connected(address) as client:
        for _ in range(3):
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += client.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200 ")
            time.sleep(HEAD_S * 1.5)
        client.sendall(b"GET /healthz HTTP/1.1\r\nHo")
        assert received(client).startswith(b"HTTP/1.1 408 ")


def test_b7_a_stream_outlives_the_limits_on_requests(address: tuple[str, int, Store], redis: redis_py.Redis) -> None:
    secret = address[2].keys.create("ann", ["read"])[1]
    headers = {"Authorization": f"Bearer {secret}", "Accept": "text/event-stream"}
    with httpx2.stream("GET", f"http://127.0.0.1:{address[1]}/v1/events", headers=headers, timeout=300) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("retry")
        time.sleep(2 * (HEAD_S + BODY_S))
        address[2].client.call("PING")
        started = threading.Thread(target=lambda: [address[2].keys.revoke(key.id) for key in address[2].keys.list()])
        started.start()
        assert "event: bye" in list(lines)
        started.join()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:8437", 200), ("127.0.0.1:1", 200), ("[::1]:8437", 200), ("192.0.2.7", 200),
        ("localhost.", 200), ("evil.example", 421), ("evil.example:8437", 421), ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example", 421), ("", 421), ("a b", 421), ("[::1].evil.example", 421),
    ],
)  # fmt: skip
def test_b7_a_name_that_another_site_made_lead_here_is_refused(
    address: tuple[str, int, Store], host: str, status: int
) -> None:
    for path in ("/healthz", "/login", "/static/theme.js", "/v1/jobs"):
        with connected(address) as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            answer = received(client)
        refused = answer.startswith(b"HTTP/1.1 421 ")
        assert refused == (status == 421), (path, answer[:100])
        if refused:
            assert b"TRIVET_ALLOWED_HOSTS" in answer
            assert b"content-security-policy" in answer.lower()


def test_b7_names_of_the_service_are_a_setting() -> None:
    settings = Settings(allowed_hosts="trivet.example.org, *.lab.example", host="0.0.0.0")
    names = known_names(settings)
    for known in ("trivet.example.org", "Trivet.Example.org:443", "a.lab.example", "a.b.lab.example:1"):
        assert is_known(known, names), known
    for unknown in ("lab.example", "xlab.example", "example.org", "a.trivet.example.org", "lab.example.evil"):
        assert not is_known(unknown, names), unknown
    assert is_known(socket.gethostname(), names)


@given(name=st.from_regex(r"[a-z0-9.:\[\]-]{0,40}", fullmatch=True))
def test_b7_only_known_names_and_addresses_are_names(name: str) -> None:
    names = frozenset({"localhost", "*.lab.example"})
    if is_known(name, names):
        bare = re.sub(r":[0-9a-z.\[\]-]*$", "", name) if not name.startswith("[") else name
        assert (
            bare.rstrip(".") == "localhost"
            or bare.rstrip(".").endswith(".lab.example")
            or re.fullmatch(r"[0-9.]+|\[?[0-9a-f:.]*:[0-9a-f:.]*\]?.*", name)
        )


def refused_sign_ins(broker: str, data: Path, redis: redis_py.Redis, **variables: str) -> set[str]:
    """The addresses from which the API believes that a sign-in came which said it came from 192.0.2.1."""
    environment = {
        **os.environ, "TRIVET_DATA": str(data), "TRIVET_REDIS_URL": broker, "TRIVET_PORT": "0", **variables,
    }  # fmt: skip
    log = data.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "api", "--behind-proxy"], env=environment, stdout=output, stderr=output
        )
    try:
        eventually(lambda: b"startup complete" in log.read_bytes() or process.poll() is not None)
        found = re.search(r"serving (http://\S+)", log.read_text())
        assert found is not None, log.read_text()
        headers = {"X-Forwarded-For": "192.0.2.1", "X-Forwarded-Proto": "https", "X-Trivet": "1"}
        answer = httpx2.post(f"{found[1]}/login", data={"key": "tvt_x_y"}, headers=headers, timeout=300)
        assert answer.status_code == 401
        assert ("strict-transport-security" in answer.headers) == bool(redis.keys("*192.0.2.1"))
        return {name.decode().rpartition("sign_ins:")[2] for name in redis.keys("trivet:sign_ins:*")}
    finally:
        process.terminate()
        process.wait(300)


@pytest.mark.parametrize(
    ("proxies", "believed"),
    [(None, True), ("127.0.0.1", True), ("127.0.0.0/8,10.0.0.1", True), ("192.0.2.9", False), ("", False)],
)
def test_b7_only_named_proxies_are_believed(
    broker: str, redis: redis_py.Redis, tmp_path: Path, proxies: str | None, believed: bool
) -> None:
    variables = {} if proxies is None else {"TRIVET_TRUSTED_PROXIES": proxies or " "}
    found = refused_sign_ins(broker, tmp_path / "data", redis, **variables)
    assert found == {"192.0.2.1" if believed else "127.0.0.1"}


@pytest.mark.parametrize("proxies", ["*", "proxy.example", "10.0.0.1/8", "1.2.3"])
def test_b7_what_is_no_address_of_a_proxy_is_refused(proxies: str) -> None:
    with pytest.raises(ValidationError, match="neither an address nor a network"):
        Settings(trusted_proxies=proxies)


def test_b7_compose_names_its_proxy() -> None:
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


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def test_b7_a_folder_is_closed_to_others_and_stays_so(tmp_path: Path) -> None:
    with umask(0o022):
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
def test_b7_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    with umask(0o022), pytest.raises(NotPrivateError, match=r"theirs belongs to user .*TRIVET_DATA"):
        close_to_others(folder)
    assert modes(folder)[str(folder)] == 0o055


@needs_root
@pytest.mark.parametrize("part", ["api", "workers"])
def test_b7_each_part_says_so_and_does_not_start(broker: str, tmp_path: Path, part: str) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    environment = {**os.environ, "TRIVET_DATA": str(folder), "TRIVET_REDIS_URL": broker, "TRIVET_PORT": "0"}
    ran = subprocess.run([sys.executable, "-m", part], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "belongs to user" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert list(folder.iterdir()) == []


SPEC: dict[str, Any] = {
    "kind": "train",
    "model": {"family": "mlp", "in_features": 64, "hidden": [16], "out_features": 10},
    "data": {"source": "digits"},
    "steps": 2,
    "checkpoint": {"every": 1},
}


@pytest.mark.distributed
def test_b7_nothing_that_a_service_and_its_jobs_write_is_open_to_other_users(tmp_path: Path) -> None:
    from local_service import address as announced
    from local_service import said, up

    from trivet.client import Client

    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o755)
    with umask(0o022), up(data) as process:
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
