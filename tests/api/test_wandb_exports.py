"""Jobs are told of at Weights & Biases by its own package: live, in one run, and only what is meant for it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import redis as redis_py
from api_world import TRAIN
from export_world import LOSSES, RESULT, Service, World, exporting, look, world
from own_broker import own_broker
from ports import free_port
from pydantic import SecretStr, ValidationError
from waiting import eventually
from wandb_receiver import WandbReceiver, wandb_receiver

import api.__main__ as program
from api.deliveries import addresses
from api.exports import wandb_process
from service.jobs.settings import Settings
from service.jobs.store.keyspace import EXPORT_SEAT, EXPORTS_DUE

needs_wandb = pytest.mark.skipif(not addresses.has_wandb(), reason="no W&B: pip install 'trivet[wandb]'")
KEY = "a-key-of-the-operator-that-has-forty-letters"
PORT = free_port()
__all__ = ["own_broker", "world"]  # any service of a broker may make an export that is due


@pytest.fixture
def receiver() -> Iterator[WandbReceiver]:
    with wandb_receiver(KEY, PORT) as receiving:
        yield receiving


@pytest.fixture(scope="module")
def service(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with exporting(broker, tmp_path_factory.mktemp("wandb"), f"http://127.0.0.1:{PORT}={KEY}") as serving:
        yield serving


def clients() -> list[psutil.Process]:
    """The processes with W&B's package."""
    found = psutil.Process().children()
    return [each for each in found if each.status() != "zombie" and "wandb_process.py" in " ".join(each.cmdline())]


@needs_wandb
def test_a_run_follows_a_job_through_a_restart_and_a_retry(
    world: World, receiver: WandbReceiver, redis: redis_py.Redis
) -> None:
    """Each step is there once, though what an attempt repeats is sent to a client that has just begun."""
    before = "wandb" in sys.modules  # models' libraries import it, if another test was here before
    job = world.submit({**TRAIN, "name": "mine", "retries": 1, "labels": {"team": "a"}}, wandb=receiver.url)
    ref = world.worker.start(job)
    world.worker.metrics(ref, LOSSES)
    look(job, "wandb", redis)
    assert world.lines(job) == []
    run = receiver.runs[job]
    eventually(lambda: len(run.rows) == 3 and "trivet/sent" in run.summary)
    assert (run.project, run.name, run.kind, run.exit_code) == ("trivet-default", "mine", "train", None)
    assert (run.config["steps"], run.config["trivet"]["job"]) == (10, job)
    (client,) = clients()
    assert KEY not in " ".join([*client.cmdline(), *client.environ().values()])
    assert ("wandb" in sys.modules) == before, "an API process does without it"
    client.kill()
    world.worker.fail(ref)
    again = world.worker.start(job)
    world.worker.metrics(again, [7.0, 0.5], first=3)
    world.worker.succeed(again, RESULT)
    assert world.exported(job, "wandb").endswith(f"/runs/{job}")
    assert run.series("loss")[::2] == [(1, 2.5), (3, 1.25)], "of what an attempt repeats, the first stays"
    assert math.isnan(run.series("loss")[1][1])
    assert run.series("loss")[3:] == [(4, 0.5)]
    assert run.exit_code == 0
    assert (run.summary["result/loss"], run.summary["trivet/state"]) == (1.25, "succeeded")
    assert run.summary["result/gate/train"] == "inductor"
    assert run.config["trivet"]["label.team"] == "a"
    assert run.config["trivet"]["computed_by.host"] == "fake"


@needs_wandb
def test_what_the_server_refused_is_named_and_sent_again(
    world: World, receiver: WandbReceiver, redis: redis_py.Redis
) -> None:
    """Its client ends a run all the same. Meanwhile the job ends as it does."""
    job = world.submit(TRAIN, wandb=receiver.url)
    ref = world.worker.start(job)
    look(job, "wandb", redis)
    receiver.refuses_streams = True
    world.worker.metrics(ref, LOSSES)
    assert world.worker.succeed(ref, RESULT).state == "succeeded"
    (line,) = eventually(lambda: world.lines(job))
    assert "the server has 0 of 3 rows" in line
    receiver.refuses_streams, receiver.key = False, "another"
    redis.zadd(EXPORTS_DUE(), {f"{job}:wandb": 1}, xx=True)
    line = eventually(lambda: world.lines(job)[1:])[0]
    assert "401" in line
    assert "user is not logged in" in line
    receiver.key = KEY
    redis.zadd(EXPORTS_DUE(), {f"{job}:wandb": 1}, xx=True)
    world.exported(job, "wandb")
    assert [step for step, _ in receiver.runs[job].series("loss")] == [1, 2, 3]


@needs_wandb
def test_one_process_at_a_time_has_runs_open(world: World, receiver: WandbReceiver, redis: redis_py.Redis) -> None:
    redis.delete(EXPORT_SEAT("wandb"))
    assert world.store.exports.hold_seat("wandb", "another", 60)
    job = world.submit(TRAIN, wandb=receiver.url)
    ref = world.worker.start(job)
    eventually(lambda: redis.hexists(f"trivet:job:{job}", "export:wandb"))
    world.worker.metrics(ref, LOSSES)
    assert not receiver.runs
    assert not world.lines(job)
    world.store.exports.leave_seat("wandb", "this one")
    assert not world.store.exports.hold_seat("wandb", "this one", 60)
    world.store.exports.leave_seat("wandb", "another")
    assert world.store.exports.hold_seat("wandb", "this one", 60)
    redis.delete(EXPORT_SEAT("wandb"))


def test_a_job_is_refused_where_its_run_cannot_be_made(world: World) -> None:
    def refusal(url: str) -> dict[str, Any]:
        answer = world.client.post("/v1/jobs", json={**TRAIN, "export": {"wandb": url}})
        assert answer.status_code == 422, answer.text
        (error,) = answer.json()["errors"]
        assert (error["path"], error["got"]) == ("export.wandb", url)
        return dict(error)

    assert "https:// URL with a host" in refusal("online")["expected"]
    assert "or `offline`" in refusal("online")["expected"]
    with patch.object(addresses, "has_wandb", return_value=True):
        assert "TRIVET_EXPORT_TOKENS" in refusal(f"http://127.0.0.1:{PORT + 1}")["expected"]
    with patch.object(addresses, "has_wandb", return_value=False):
        assert "pip install 'trivet[wandb]'" in refusal("offline")["expected"]


def test_an_operator_is_told_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = "https://api.wandb.ai"
    with pytest.raises(ValidationError, match=f"export_wandb has no key; expected {url}=KEY"):
        Settings(data=tmp_path, export_wandb=url, export_tokens=SecretStr(f"{url}:8443={KEY}"))
    tokens = {"TRIVET_EXPORT_WANDB": url, "TRIVET_EXPORT_TOKENS": f"{url}={KEY}", "TRIVET_DATA": str(tmp_path)}
    with patch.dict(os.environ, tokens), patch.object(program, "has_wandb", return_value=False):
        assert program.main([]) == 2
    assert "TRIVET_EXPORT_WANDB needs W&B's package: pip install 'trivet[wandb]'" in capsys.readouterr().err


def test_the_process_ends_when_nobody_asks_and_when_a_run_was_left() -> None:
    runs, now = wandb_process.Runs({}, ""), time.monotonic()
    assert not runs.has_nothing_to_do(now)
    assert runs.has_nothing_to_do(now + 61)
    runs._used["job"] = now
    assert not runs.has_nothing_to_do(now + 179), "a job that goes on is looked at each minute"
    assert runs.has_nothing_to_do(now + 181)
    runs._used["other"] = math.inf
    assert not runs.has_nothing_to_do(now + 181), "an answer is waited for"


@needs_wandb
@pytest.mark.slow
def test_an_offline_run_is_kept_for_the_command_that_sends_it(world: World, receiver: WandbReceiver) -> None:
    job = world.run(TRAIN, wandb="offline")
    assert world.exported(job, "wandb").endswith("for `wandb sync`")
    assert not receiver.asked
    (folder,) = (world.settings.layout.wandb / job).glob("wandb/offline-run-*")
    words = [sys.executable, "-m", "wandb", "sync", str(folder)]
    own = {"WANDB_BASE_URL": receiver.url, "WANDB_API_KEY": KEY, "WANDB_ERROR_REPORTING": "false"}
    subprocess.run(words, env={**os.environ, **own}, check=True, cwd=folder, capture_output=True)
    run = receiver.runs[job]
    assert [step for step, _ in run.series("loss")] == [1, 2, 3]
    assert (run.exit_code, run.summary["result/loss"]) == (0, 1.25)
    assert world.client.delete(f"/v1/jobs/{job}").is_success
    assert not folder.exists()
