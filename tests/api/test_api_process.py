"""``python -m api`` as a process: where it binds, what it writes, how it ends."""

from __future__ import annotations

import signal
import socket
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest
import redis as redis_py
from api_world import TRAIN, bearer
from lanes import first_fast
from own_process import address, process

from api import __main__ as api
from service.jobs.host.embedded_broker import EmbeddedBroker

PATIENT_API = ("-c", "import sys; from api import __main__ as api; api._SHUTDOWN_S = 3600; sys.exit(api.main())")
"""The API, which gives open requests an hour to end before it ends itself."""


@pytest.mark.parametrize("number", first_fast(1, [signal.SIGTERM, signal.SIGHUP]))
def test_a_signal_ends_open_streams_and_the_process_at_once(
    redis: redis_py.Redis, broker: str, tmp_path: Path, number: signal.Signals
) -> None:
    """The first start writes the admin's key, for its owner only, and the next one keeps it."""
    key_file = tmp_path / "data" / "admin.key"
    with process(broker, tmp_path / "data", program=PATIENT_API) as (running, log):
        url = address(log)
        assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
        secret = key_file.read_text().strip()
        headers = bearer(secret)
        job_id = httpx2.post(f"{url}/v1/jobs", json=TRAIN, headers=headers, timeout=300).json()["id"]
        stream = {**headers, "Accept": "text/event-stream"}
        with httpx2.stream("GET", f"{url}/v1/jobs/{job_id}/events", headers=stream, timeout=300.0) as response:
            events = iter(httpx2.EventSource(response))
            assert next(event for event in events if event.event == "state")
            running.send_signal(number)
            assert [event.event for event in events][-1] == "bye"
        assert running.wait(300) in (0, -signal.SIGTERM), "an open stream must not hold up the end"
        assert secret not in log.read_text()
    with process(broker, tmp_path / "data") as (_, log):
        assert httpx2.get(f"{address(log)}/v1/keys", headers=headers, timeout=300).status_code == 200
        assert key_file.read_text().strip() == secret


@pytest.fixture
def refusal(
    broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What the API says that refuses to start, without a process of its own."""

    def refusal(*arguments: str, broker: str = broker) -> str:
        for name, value in {"DATA": str(tmp_path / "data"), "REDIS_URL": broker, "PORT": "0"}.items():
            monkeypatch.setenv(f"TRIVET_{name}", value)
        monkeypatch.setattr(api, "log_to_stderr", lambda *_, **__: None)  # which is for the life of a process
        assert api.main([*arguments]) == 2
        return capsys.readouterr().err

    return refusal


@pytest.mark.slow
def test_a_broker_that_keeps_nothing_on_disk_is_warned_of(tmp_path: Path) -> None:
    with EmbeddedBroker.start(tmp_path / "broker") as server:
        with redis_py.Redis.from_url(server.url) as client:
            client.config_set("appendonly", "no")
        with process(server.url, tmp_path / "data") as (_, log):
            address(log)
            assert "WARNING api: the broker keeps nothing on disk" in log.read_text()


@pytest.mark.slow
def test_requests_wait_for_a_broker_that_restarts_and_readiness_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "broker"
    with ExitStack() as api, ThreadPoolExecutor() as pool:
        with EmbeddedBroker.start(folder) as server:
            _, log = api.enter_context(process(server.url, tmp_path / "data", wait_s="300"))
            url = address(log)
        headers = bearer((tmp_path / "data" / "admin.key").read_text().strip())
        assert httpx2.get(f"{url}/readyz", timeout=300).status_code == 503
        waiting = [pool.submit(httpx2.get, f"{url}/v1/jobs", headers=headers, timeout=300) for _ in range(4)]
        waiting.append(pool.submit(httpx2.post, f"{url}/v1/jobs", json=TRAIN, headers=headers, timeout=300))
        with EmbeddedBroker.start(folder):
            assert [each.result().status_code for each in waiting] == [200] * 4 + [201]


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_an_open_address_without_encryption_is_refused(refusal: Callable[..., str], tmp_path: Path, host: str) -> None:
    said = refusal("--host", host)
    assert "--behind-proxy" in said
    assert "--tls-cert" in said
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_an_open_address_behind_a_proxy_is_taken(redis: redis_py.Redis, broker: str, tmp_path: Path) -> None:
    with process(broker, tmp_path / "data", "--host", "0.0.0.0", "--behind-proxy") as (_, log):
        port = address(log).rpartition(":")[2]
        assert httpx2.get(f"http://127.0.0.1:{port}/healthz", timeout=300).status_code == 200


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "70000"], "port"),
        (["--tls-cert", "x.pem"], "tls_key"),
    ],
)
def test_bad_settings_are_refused_by_name(refusal: Callable[..., str], arguments: list[str], said: str) -> None:
    assert said in refusal(*arguments)


def test_without_a_broker_it_says_how_to_get_one(
    refusal: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIVET_BROKER_WAIT_S", "0.1")
    assert "TRIVET_REDIS_URL" in refusal(broker=f"unix://{tmp_path}/nobody.sock")


@pytest.mark.slow
def test_a_taken_port_is_named(redis: redis_py.Redis, refusal: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"cannot bind 127.0.0.1:{port}: Address already in use" in refusal("--port", port)
