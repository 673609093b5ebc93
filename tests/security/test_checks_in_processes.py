"""Checks of uploaded files run in limited processes: what a file costs is bounded, and nobody else waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import redis as redis_py
from pydantic import SecretStr
from serving import MLP, PATIENT, Service, asking, problems, request, serving, stored
from waiting import eventually
from worker_fleet import is_gone

from api.offload import Checker, CheckerSettings, CheckUnavailable
from api.offload import checker as checking
from service.jobs.files import DataLayout
from service.jobs.kinds.registry import spec_adapter
from service.jobs.records import Problem, Rejected
from service.jobs.settings import Settings
from service.jobs.submission.request import CheckRequest


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where other work has the processors, a second of processor time takes many by the clock."""
    monkeypatch.setattr("api.main.CheckerSettings", lambda: PATIENT)


def text(mebibytes: int) -> bytes:
    """Constraints on one input whose reading takes seconds of processor time for each few mebibytes."""
    line = b"(assert (<= X_0 1.0))\n(assert (>= X_0 (+ -1.0 0.5)))\n"
    head = b"(declare-const X_0 Real)\n(declare-const Y_0 Real)\n"
    return head + line * (mebibytes * 2**20 // len(line))


_of_others: list[psutil.Process] = []


@pytest.fixture(autouse=True)
def _apart_from_others() -> None:
    """An API that an earlier file of tests has started in this process keeps processes of checks of its own."""
    _of_others[:] = servers()


def servers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, whether or not it was waited for
            if "service.jobs.submission.server" in child.cmdline():
                found.append(child)
    return found


def checks() -> list[psutil.Process]:
    """Processes of checks of the test: children of its fork server."""
    found = []
    for server in servers():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += server.children() if server not in _of_others else []
    return found


@pytest.mark.slow
def test_a_file_that_takes_more_processor_time_is_refused_with_the_limit_named(data: DataLayout) -> None:
    file_id = stored(data, text(24))
    (problem,) = problems(data, file_id, memory=8.0, seconds=1)
    assert problem.path == "property.vnnlib"
    assert "takes more than 1 s of processor time (TRIVET_CHECK_SECONDS)" in problem.message
    assert problem.got == file_id
    assert problem.expected == "a check within 8 GiB of memory and 1 s of processor time"


def test_a_file_that_needs_more_memory_is_refused_with_the_limit_named(data: DataLayout) -> None:
    """It is one number, of which there is more than one copy while it is read."""
    file_id = stored(data, b"(declare-const X_0 Real)\n(assert (<= X_0 1." + b"0" * (60 << 20) + b"))\n")
    (problem,) = problems(data, file_id, memory=0.125, seconds=600)
    assert problem.path == "property.vnnlib"
    assert "needs more than 0.125 GiB of memory (TRIVET_CHECK_MEMORY_GIB)" in problem.message


def test_a_check_that_does_not_go_on_is_ended_by_the_clock(data: DataLayout) -> None:
    """Its process is stopped, so that it takes no processor time."""

    async def stopped() -> list[Problem]:
        checker = Checker(Settings(check_memory_gib=8.0, check_seconds=300), CheckerSettings(clock_ratio=1 / 100))
        task = asyncio.create_task(checker.problems(request(data, stored(data, text(60))), "ada"))
        while not (running := checks()):
            await asyncio.sleep(0.01)
        running[0].suspend()
        with pytest.raises(Rejected) as rejected:
            await task
        assert not running[0].is_running()
        await checker.stop()
        return rejected.value.problems

    (problem,) = asyncio.run(stopped())
    assert "takes more than 3 s (0.01 times TRIVET_CHECK_SECONDS)" in problem.message


def test_a_check_cannot_write_files_and_has_no_secrets(data: DataLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server's environment has what Python needs; the process cannot gain privileges or write."""
    monkeypatch.setenv("TRIVET_KEY", "tvt_secret")
    monkeypatch.setenv("DATABASE_PASSWORD", "secret")

    async def looked_at() -> None:
        checker = Checker(Settings(check_seconds=60, check_memory_gib=8.0), PATIENT)
        task = asyncio.create_task(checker.problems(request(data, stored(data, text(48))), "ada"))
        while not (running := checks()):
            await asyncio.sleep(0.01)
        (process,) = running
        while process.rlimit(psutil.RLIMIT_CPU)[0] != 60:  # the last that is set
            await asyncio.sleep(0.01)
        assert process.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
        assert process.rlimit(psutil.RLIMIT_CORE) == (0, 0)
        assert process.rlimit(psutil.RLIMIT_NOFILE)[1] <= 64
        assert 8 * 2**30 < process.rlimit(psutil.RLIMIT_AS)[1] < 10 * 2**30
        assert "NoNewPrivs:\t1" in Path(f"/proc/{process.pid}/status").read_text()
        environment = process.parent().environ()
        assert "PATH" in environment
        assert not {"TRIVET_KEY", "DATABASE_PASSWORD"} & environment.keys()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert is_gone(process)
        await checker.stop()

    asyncio.run(looked_at())


@pytest.mark.slow
def test_a_server_that_was_killed_is_started_again(data: DataLayout) -> None:
    async def killed() -> None:
        checker = Checker(Settings(check_memory_gib=8.0), PATIENT)
        long, short = request(data, stored(data, text(48))), request(data, stored(data, b"no query"))
        task = asyncio.create_task(checker.problems(long, "ada"))
        while not (running := checks()):
            await asyncio.sleep(0.01)
        running[0].parent().kill()
        with pytest.raises(CheckUnavailable):
            await task
        assert [each.path for each in await checker.problems(short, "ada")] == ["property.vnnlib"]
        await checker.stop()
        eventually(lambda: not running[0].is_running())

    asyncio.run(killed())


def test_an_owner_with_too_many_submissions_is_told_to_wait(data: DataLayout) -> None:
    async def crowded() -> None:
        checker = Checker(Settings(check_memory_gib=8.0), replace(PATIENT, most_waiting_per_owner=2))
        asked = request(data, stored(data, text(48)))
        tasks = [asyncio.create_task(checker.problems(asked, "ada")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(checking.ProblemError) as refused:
            await checker.problems(asked, "ada")
        assert refused.value.status == 429
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await checker.problems(request(data, stored(data, b"no query")), "ada")
        await checker.stop()

    asyncio.run(crowded())


@pytest.fixture
def service(broker: str, redis: redis_py.Redis, data: DataLayout) -> Iterator[Service]:
    settings = Settings(
        data=data.root, redis_url=SecretStr(broker), check_seconds=600, check_memory_gib=8.0, max_checks=2
    )
    with serving(settings) as running:
        yield running


def submitted(service: Service, owner: str, spec: dict[str, Any]) -> socket.socket:
    """The connection of a client that has submitted, and does not read the answer."""
    body = json.dumps(spec).encode()
    secret = service.store.keys.create(owner, ["submit"])[1]
    address = urlsplit(service.url)
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(
        b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        + f"Authorization: Bearer {secret}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return connection


@pytest.mark.slow
def test_others_are_served_while_a_file_is_checked_and_a_client_that_leaves_ends_its_check(service: Service) -> None:
    """Eighty clients of two owners submit what takes minutes, more than the API has threads."""
    long = asking(service.store.files.add([text(60)], "text/plain").id)
    connections = [submitted(service, owner, long) for owner in ("ada", "bob") for _ in range(40)]
    eventually(lambda: len(checks()) == 2)
    running = checks()
    with service.client("eve") as other:
        assert other.get("/healthz").status_code == 200
        assert other.get("/v1/jobs").json()["items"] == []
        assert checks() == running
    for connection in connections:
        connection.close()
    eventually(lambda: not any(process.is_running() for process in running))
    eventually(lambda: not checks())


@pytest.mark.slow
def test_one_owners_checks_do_not_keep_anothers_waiting(service: Service) -> None:
    long, short = (asking(service.store.files.add([text(size)], "text/plain").id) for size in (60, 0))
    connections = [submitted(service, "ada", long) for _ in range(5)]
    eventually(lambda: len(checks()) == 1)
    (running,) = checks()
    with service.client("bob") as other:
        answer = other.post("/v1/jobs", json=short)
    assert answer.status_code == 422
    assert "asserts nothing" in answer.json()["detail"]
    assert checks() == [running]
    for connection in connections:
        connection.close()
    eventually(lambda: not checks())


@pytest.mark.slow
def test_a_compressed_file_is_checked_as_it_unpacks(data: DataLayout) -> None:
    file_id = stored(data, gzip.compress(text(4)))
    (problem,) = problems(data, file_id, memory=8.0, seconds=1)
    assert "TRIVET_CHECK_SECONDS" in problem.message


def plain(data: DataLayout, steps: int) -> CheckRequest:
    """The check of a job that names no file."""
    spec = spec_adapter.validate_python({"kind": "train", "model": MLP, "data": {"source": "digits"}, "steps": steps})
    return CheckRequest.of({"": spec}, None, lambda _: None, lambda _: None, data, uploads=())


def test_a_process_that_read_no_file_takes_the_next_request_of_its_owner_alone(data: DataLayout) -> None:
    async def asked() -> None:
        checker = Checker(Settings(check_memory_gib=8.0), replace(PATIENT, keep_s=3600.0))
        first = [each.path for each in await checker.problems(plain(data, 1), "ada")]
        (kept,) = checks()
        assert [each.path for each in await checker.problems(plain(data, 2), "ada")] == first
        assert checks() == [kept]
        maps = Path(f"/proc/{kept.ppid()}/maps")
        assert "onnx" not in maps.read_text(), "nobody has files yet"
        await checker.problems(request(data, stored(data, b"no query")), "ada")
        assert checks() == [kept], "what reads a file has a process of its own, which has ended"
        assert "onnx" in maps.read_text(), "the next check of a file finds it imported"
        await checker.problems(plain(data, 1), "bob")
        assert len(checks()) == 2
        await checker.stop()
        eventually(lambda: is_gone(kept))

    asyncio.run(asked())


@pytest.mark.parametrize("server_too", [False, True])
def test_what_a_kept_process_cannot_answer_a_new_one_does(data: DataLayout, server_too: bool) -> None:
    """Also where the server that it was forked from was killed, which takes it along."""

    async def asked() -> None:
        checker = Checker(Settings(check_memory_gib=8.0), replace(PATIENT, keep_s=3600.0))
        first = await checker.problems(plain(data, 1), "ada")
        (kept,) = checks()
        if server_too:
            kept.parent().kill()
            await asyncio.to_thread(eventually, lambda: is_gone(kept))
        else:
            kept.kill()
        assert await checker.problems(plain(data, 1), "ada") == first
        (new,) = checks()
        assert new != kept
        await checker.stop()

    asyncio.run(asked())


def test_kept_processes_are_few_and_end_when_they_are_old(data: DataLayout) -> None:
    async def asked() -> None:
        checker = Checker(Settings(check_memory_gib=8.0, max_checks=2), replace(PATIENT, keep_s=3600.0))
        for owner in ("ada", "bob", "eve"):
            await checker.problems(plain(data, 1), owner)
        await asyncio.to_thread(eventually, lambda: len(checks()) == 2)
        await checker.stop()
        checker = Checker(Settings(check_memory_gib=8.0), replace(PATIENT, keep_s=0.0))
        await checker.problems(plain(data, 1), "ada")
        await asyncio.to_thread(eventually, lambda: not checks())
        await checker.stop()

    asyncio.run(asked())
