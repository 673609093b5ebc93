"""The service of one's own data folder is reached by its socket; any other one proves itself by its certificate."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis as redis_py
from key_listener import SECRET, ask
from waiting import eventually

from trivet.client import Client
from trivet.connection import Connection
from trivet.endpoint import resolve
from trivet.errors import Refused, TrivetError, Unreachable

pytestmark = pytest.mark.usefixtures("folder")


@contextmanager
def api(data: Path, broker: str, *arguments: str, **variables: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    log = data.with_suffix(".log")
    environment = {**os.environ, "TRIVET_DATA": str(data), "TRIVET_REDIS_URL": broker, "TRIVET_PORT": "0", **variables}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "api", *arguments], env=environment, stdout=output, stderr=output
        )
    try:
        yield process, log
    finally:
        process.terminate()
        process.wait(300)


def ready(data: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return Client(f"unix://{data}/api.sock", "none").is_ready()
        except Unreachable:
            return False

    eventually(answers)


@pytest.mark.slow
def test_the_service_of_the_data_folder_is_reached_by_its_socket(
    broker: str, redis: redis_py.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / ("a folder with a path that is longer than a socket's address may be " * 2) / "data"
    data.parent.mkdir()
    with api(data, broker) as (process, log):
        ready(data, process, log)
        monkeypatch.setenv("TRIVET_DATA", str(data))
        ask()
        url = (data / "api.url").read_text().strip()
        assert resolve(None, None).url == resolve(url, None).url == f"unix://{data}/api.sock"
        assert resolve(url.replace("127.0.0.1", "localhost"), None).key == (data / "admin.key").read_text().strip()
        elsewhere = resolve("http://127.0.0.1:9", None)
        assert (elsewhere.key, elsewhere.url) == (None, "http://127.0.0.1:9")
        assert f"is for {url} only" in (elsewhere.advice or "")
        monkeypatch.setenv("TRIVET_KEY", "tvt_of_another")
        with pytest.raises(Refused, match=r"not valid, has expired, or was revoked; the key is that of TRIVET_KEY"):
            ask()
        monkeypatch.delenv("TRIVET_KEY")
    assert not (data / "api.sock").exists()
    with pytest.raises(Unreachable):
        ask()


@pytest.mark.slow
def test_a_second_service_of_a_folder_leaves_the_socket_to_the_first_and_takes_it_over_once_that_was_killed(
    broker: str, redis: redis_py.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    monkeypatch.setenv("TRIVET_DATA", str(data))
    with api(data, broker) as (process, log):
        ready(data, process, log)
        with api(data, broker) as (second, second_log):
            eventually(lambda: b"startup complete" in second_log.read_bytes() or second.poll() is not None)
            assert "another process answers" in second_log.read_text()
            ask()
        ask()
        process.kill()
        process.wait()
    assert (data / "api.sock").exists()
    with pytest.raises(Unreachable, match=r"api\.sock"):
        ask()
    with api(data, broker) as (process, log):
        ready(data, process, log)
        ask()


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate of this machine's address, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=trivet",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_certificates_are_verified_and_one_can_be_pinned(
    broker: str, redis: redis_py.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    cert, key = certificate(tmp_path, "ours")
    other, _ = certificate(tmp_path, "other")
    with api(data, broker, "--tls-cert", str(cert), "--tls-key", str(key)) as (process, log):
        ready(data, process, log)
        monkeypatch.setenv("TRIVET_URL", (data / "api.url").read_text().strip())
        monkeypatch.setenv("TRIVET_KEY", (data / "admin.key").read_text().strip())
        for pinned in (None, other):
            if pinned is not None:
                monkeypatch.setenv("TRIVET_CA_CERT", str(pinned))
            with pytest.raises(Unreachable, match=r"(?i)certificate"):
                ask()
        monkeypatch.setenv("TRIVET_CA_CERT", str(cert))
        ask()
        monkeypatch.setenv("TRIVET_CA_CERT", str(tmp_path / "missing.pem"))
        with pytest.raises(TrivetError, match=r"missing\.pem"):
            ask()


def test_a_connection_names_its_socket(folder: Path) -> None:
    with pytest.raises(Unreachable) as missing:
        Connection(f"unix://{folder}/nowhere/api.sock", SECRET)
    assert "nowhere/api.sock" in str(missing.value)
