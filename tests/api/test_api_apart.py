"""The process that makes expensive answers says what its parent would, and ends with it."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path

import httpx2
import psutil
import pytest
import redis as redis_py
from api_world import TRAIN, bearer
from own_process import address, process
from waiting import eventually

from api.offload.apart import Apart, NotReady

PATHS = ("/v1/jobs?limit=1000&include=spec&q=%C3%B6", "/v1/jobs:counts?kind=none", "/v1/queue?limit=2")
OWN_HEADERS = {"date", "x-request-id"}


def told(answer: httpx2.Response) -> tuple[int, bytes, dict[str, str]]:
    name = answer.headers["x-request-id"].encode()
    headers = {key: value for key, value in answer.headers.items() if key not in OWN_HEADERS}
    return answer.status_code, answer.content.replace(name, b""), headers


@pytest.mark.slow
def test_answers_from_apart_are_the_same_and_its_loss_is_made_up_for(
    redis: redis_py.Redis, broker: str, tmp_path: Path
) -> None:
    with process(broker, tmp_path / "data") as (running, log):
        url, key = address(log), (tmp_path / "data" / "admin.key").read_text().strip()
        with httpx2.Client(base_url=url, headers=bearer(key), timeout=300) as client:
            client.post("/v1/jobs", json={**TRAIN, "name": "ö"})
            here = [told(client.get(path)) for path in PATHS]
            (made,) = eventually(lambda: re.findall(r"process (\d+) makes expensive answers", log.read_text()))
            apart = psutil.Process(int(made))
            before = apart.io_counters().read_chars
            assert [told(client.get(path)) for path in PATHS] == here
            assert apart.io_counters().read_chars > before, "it was asked"
            named = client.get(PATHS[2], headers={"X-Request-ID": "mine", "X-Forwarded-For": "192.0.2.1"})
            assert named.headers["x-request-id"] == "mine"
            made_many = client.post("/v1/jobs:batch", json={"jobs": [TRAIN, TRAIN]})
            assert (made_many.status_code, len(made_many.json()["items"])) == (201, 2)
            (entry, *_) = client.get("/v1/audit").json()["items"]
            assert (entry["action"], entry["address"]) == ("job.submit", "127.0.0.1")
            apart.kill()
            eventually(lambda: "starting another" in log.read_text())
            assert told(client.get(PATHS[1])) == here[1] or client.get(PATHS[1]).status_code == 200
            again = eventually(lambda: re.findall(r"process (\d+) makes expensive answers", log.read_text())[1:])
        running.send_signal(signal.SIGKILL)
        eventually(lambda: not psutil.pid_exists(int(again[0])))


def test_a_start_that_fails_is_tried_again_by_a_later_request(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    async def fail(_: Path) -> None:
        nonlocal tries
        tries += 1
        raise OSError("too many open files")

    async def ask() -> None:
        apart = Apart()
        while tries < 2:
            with pytest.raises(NotReady):
                await apart.forward({}, None, None, b"")  # type: ignore[arg-type]
            await asyncio.sleep(0)
        await apart.stop()

    monkeypatch.setattr("api.offload.apart._start_process", fail)
    monkeypatch.setattr("api.offload.apart._PAUSE_S", 0.0)
    asyncio.run(asyncio.wait_for(ask(), 60))


def test_the_process_is_let_go_when_nobody_asks_and_kept_while_an_answer_is_made() -> None:
    async def watch() -> None:
        process = await asyncio.create_subprocess_exec("sleep", "3600")
        apart = Apart(idle_s=0.05)
        assert await apart._outlasts_need(process)
        apart._open = 1
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(apart._outlasts_need(process), 0.3)
        process.kill()
        assert not await apart._outlasts_need(process), "it ended by itself"

    asyncio.run(watch())
