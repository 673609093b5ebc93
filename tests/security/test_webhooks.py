"""Webhooks: what a real receiver on the loopback is told, however often, and by what it knows that it is true."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis as redis_py
from own_broker import own_broker
from pydantic import SecretStr
from serving import Service, serving
from waiting import eventually
from webhook_receiver import Receiver
from webhook_service import SPEC, notices

from api.deliveries.webhooks import SenderTimes, WebhookSender
from service.jobs.events import MetricEvent
from service.jobs.host.embedded_broker import EmbeddedBroker
from service.jobs.records import PartOutcome
from service.jobs.records.webhooks import WebhookEvent
from service.jobs.settings import Settings
from service.jobs.store import HostReport, Store, stubs
from service.jobs.store.keyspace import WEBHOOK_CHANGES, WEBHOOK_DUE, WEBHOOKS_FAILING
from trivet.webhooks import verify
from workers.supervisor.uploader import Thresholds

__all__ = ["own_broker"]  # the file's service lives as long as its tests


@pytest.fixture(scope="module")
def service(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    settings = Settings(data=tmp_path_factory.mktemp("data"), redis_url=SecretStr(broker), webhook_allow="127.0.0.0/8")
    with serving(settings) as running:
        yield running


@pytest.fixture
def alone() -> Iterator[str]:
    """The broker of a test that runs services of its own."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker.start(Path(folder), fsync="everysec") as server:
        yield server.url


@pytest.fixture
def admin(service: Service, redis: redis_py.Redis) -> Iterator[httpx2.Client]:
    secret = service.store.keys.create("root", ["admin"])[1]
    with httpx2.Client(base_url=service.url, headers={"Authorization": f"Bearer {secret}"}, timeout=300.0) as client:
        yield client


def create(client: httpx2.Client, url: str, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/webhooks", json={"url": url, **fields})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def run_and_cancel(client: httpx2.Client) -> str:
    job: str = client.post("/v1/jobs", json=SPEC).json()["id"]
    assert client.post(f"/v1/jobs/{job}/cancel").is_success
    return job


def make_due(redis: redis_py.Redis) -> None:
    """Let the pauses before further attempts be over."""
    for name in redis.zrange(WEBHOOK_DUE(), 0, -1):
        redis.zadd(WEBHOOK_DUE(), {name: 1}, xx=True)


def test_a_receiver_is_told_of_a_job_and_can_tell_that_it_is_true(admin: httpx2.Client, receiver: Receiver) -> None:
    hook = create(admin, receiver.url)
    assert hook["states"] == ["cancelled", "failed", "succeeded"]
    assert "secret" not in admin.get("/v1/webhooks").json()["items"][0]
    job = run_and_cancel(admin)
    headers, body = eventually(lambda: receiver.taken and receiver.taken[0])
    event = verify(hook["secret"], headers, body)
    assert (event.type, event.data.job, event.data.name, event.data.project) == (
        "job.cancelled",
        job,
        "mine",
        "default",
    )
    delivery = eventually(
        lambda: (
            (found := admin.get(f"/v1/webhooks/{hook['id']}/deliveries").json()["items"])
            and found[0]["state"] == "delivered"
            and found[0]
        )
    )
    assert (delivery["id"], delivery["attempts"], delivery["status"]) == (headers["webhook-id"], 1, 204)
    assert len(receiver.taken) == 1


@pytest.mark.slow
def test_what_is_not_wanted_is_not_told(admin: httpx2.Client, receiver: Receiver) -> None:
    create(admin, receiver.url + "/verify", kinds=["verify"])
    admin.post("/v1/projects", json={"name": "other"})
    create(admin, receiver.url + "/other", project="other")
    create(admin, receiver.url + "/queued", states=["queued"])
    job = run_and_cancel(admin)
    eventually(lambda: receiver.taken)
    second = run_and_cancel(admin)
    eventually(lambda: len(receiver.taken) == 2)
    told = [told_by(body) for _, body in receiver.taken]
    assert told == [("job.queued", job), ("job.queued", second)]


def told_by(body: bytes) -> tuple[str, str]:
    event = WebhookEvent.model_validate_json(body)
    return event.type, event.data.job


def test_a_delivery_that_fails_is_sent_again_with_the_same_id(
    admin: httpx2.Client, receiver: Receiver, redis: redis_py.Redis
) -> None:
    """A redirect is a failure, too: it could lead anywhere."""
    receiver.answers = [500, 302, 204]
    hook = create(admin, receiver.url)
    run_and_cancel(admin)

    def newest() -> dict[str, Any]:
        found: list[dict[str, Any]] = admin.get(f"/v1/webhooks/{hook['id']}/deliveries").json()["items"]
        return found[0] if found else {"attempts": 0}

    for attempt, status in ((1, 500), (2, 302)):
        failed = eventually(lambda attempt=attempt: (now := newest())["attempts"] == attempt and now)
        assert (failed["state"], failed["status"]) == ("pending", status)
        assert f"answered {status}" in failed["error"]
        assert failed["next_at"] > failed["last_at"]
        assert admin.get("/v1/webhooks").json()["items"][0]["failing_since"] is not None
        make_due(redis)
    done = eventually(lambda: (now := newest())["state"] == "delivered" and now)
    assert (done["attempts"], done["error"]) == (3, None)
    assert len({headers["webhook-id"] for headers, _ in receiver.taken}) == 1
    assert admin.get("/v1/webhooks").json()["items"][0]["failing_since"] is None


def test_a_job_tells_its_own_receiver_of_states_and_of_numbers_that_reach_thresholds(
    admin: httpx2.Client, service: Service, receiver: Receiver
) -> None:
    asked = {"webhook": receiver.url, "on": ["succeeded"], "when": {"eval_accuracy": ">= 0.9", "loss": "< 0.5"}}
    job = admin.post("/v1/jobs", json=SPEC | {"notify": asked}).json()["id"]
    attempts = service.store.attempts
    service.store.hosts.beat(HostReport("here", "127.0.0.1", cpu_slots=1))
    attempts.place()
    (ref,) = attempts.due()
    thresholds = Thresholds(attempts.claim(ref, "one").spec.notify)
    curve = [{"loss": 0.6, "eval_accuracy": 0.5}, {"loss": 0.4}, {"loss": 0.3, "eval_accuracy": 0.95}]
    for step, values in enumerate(curve, start=1):
        event: MetricEvent = {"type": "metric", "time": 1.0, "rank": 0, "step": step, "values": values}
        attempts.emit(ref, [event], batch=step, reached=thresholds.reached([event]))
    again: MetricEvent = {"type": "metric", "time": 1.0, "rank": 0, "step": 4, "values": {"loss": 0.1}}
    attempts.emit(ref, [again], batch=4, reached=Thresholds(attempts.claim(ref, "one").spec.notify).reached([again]))
    attempts.finish(ref, PartOutcome("succeeded", {"final_loss": 0.1}))
    told = notices(admin, job, 3)
    assert {each["status"] for each in told} == {204}
    secret = admin.get("/v1/webhooks/secret").json()["secret"]
    events = [verify(secret, headers, body) for headers, body in receiver.taken]
    metrics = {each.data.metric.name: each.data.metric for each in events if each.data.metric}
    assert {name: (each.value, each.step, each.threshold) for name, each in metrics.items()} == {
        "loss": (0.4, 2, "< 0.5"), "eval_accuracy": (0.95, 3, ">= 0.9"),
    }  # fmt: skip
    assert sorted(each.type for each in events) == ["job.metric", "job.metric", "job.succeeded"]
    assert {each.data.job for each in events} == {job}


def test_what_a_job_asks_for_is_sent_again_and_outlives_the_job(
    admin: httpx2.Client, receiver: Receiver, redis: redis_py.Redis
) -> None:
    receiver.answers = [503, 204]
    job = admin.post("/v1/jobs", json=SPEC | {"notify": {"webhook": receiver.url}}).json()["id"]
    admin.post(f"/v1/jobs/{job}/cancel")
    eventually(lambda: admin.get(f"/v1/jobs/{job}/notices").json()["items"][:1] and receiver.taken)
    (failed,) = eventually(
        lambda: (found := admin.get(f"/v1/jobs/{job}/notices").json()["items"])[0]["attempts"] == 1 and found
    )
    assert (failed["state"], failed["status"], failed["url"]) == ("pending", 503, receiver.url)
    assert admin.delete(f"/v1/jobs/{job}").is_success
    make_due(redis)
    eventually(lambda: len(receiver.taken) == 2)
    assert receiver.taken[0][0]["webhook-id"] == receiver.taken[1][0]["webhook-id"]
    eventually(lambda: redis.zcard(WEBHOOK_DUE()) == 0)


def test_of_a_sweep_the_whole_is_told_and_not_each_job(admin: httpx2.Client, receiver: Receiver) -> None:
    sweep = {"grid": {"optimizer.lr": [0.1, 0.2, 0.3]}}
    job = admin.post("/v1/jobs", json=SPEC | {"sweep": sweep, "notify": {"webhook": receiver.url}}).json()["id"]
    admin.post(f"/v1/jobs/{job}/cancel")
    (told,) = notices(admin, job, 1)
    assert (told["event"]["type"], told["event"]["data"]["job"]) == ("job.cancelled", job)
    second = run_and_cancel(admin)
    assert admin.get(f"/v1/jobs/{second}/notices").json()["items"] == []
    assert len(receiver.taken) == 1


def test_the_secret_is_the_projects_and_may_be_renewed(admin: httpx2.Client, service: Service) -> None:
    first = admin.get("/v1/webhooks/secret").json()
    assert first["project"] == "default"
    with service.client("ada") as ada:
        assert ada.get("/v1/webhooks/secret").json() == first
        assert ada.post("/v1/webhooks/secret/renew").status_code == 403
        assert ada.get("/v1/webhooks/secret?project=other").status_code == 403
    assert admin.get("/v1/webhooks/secret?project=nowhere").status_code == 404
    renewed = admin.post("/v1/webhooks/secret/renew").json()["secret"]
    assert renewed != first["secret"]
    assert admin.get("/v1/webhooks/secret").json()["secret"] == renewed


NO_NOTICES: list[tuple[dict[str, Any], str]] = [
    ({"webhook": "ftp://example.org/"}, "notify.webhook"),
    ({"webhook": "https://example.org/", "on": ["done"]}, "notify.on.0"),
    ({"webhook": "https://example.org/", "on": []}, "notify.on"),
    ({"webhook": "https://example.org/", "when": {"loss": "0.5"}}, "notify.when.loss"),
    ({"webhook": "https://example.org/", "when": {"loss": "< nan"}}, "notify.when.loss"),
    ({"webhook": "https://example.org/", "when": {"loss": "< low"}}, "notify.when.loss"),
]


def test_a_spec_that_asks_for_what_cannot_be_told_is_refused(admin: httpx2.Client) -> None:
    for asked, path in NO_NOTICES:
        answer = admin.post("/v1/jobs", json=SPEC | {"notify": asked})
        assert answer.status_code == 422, asked
        assert [error["path"] for error in answer.json()["errors"]] == [path]


def test_a_spec_that_names_an_address_where_nothing_may_be_sent_is_refused(
    admin: httpx2.Client, receiver: Receiver
) -> None:
    """By every way to submit; addresses that the operator allows are taken, and names that nobody knows by now."""
    metadata, private = "http://169.254.169.254/latest", "https://10.1:8443/"  # which stands for 10.0.0.1
    asked = SPEC | {"notify": {"webhook": private}, "export": {"mlflow": metadata, "otlp": "https://[::1]:4318"}}
    paths = ["notify.webhook", "export.mlflow", "export.otlp"]
    answer = admin.post("/v1/jobs", json=asked)
    assert answer.status_code == 422
    assert [error["path"] for error in answer.json()["errors"]] == paths
    assert "10.0.0.1) is neither a public address" in answer.json()["errors"][0]["message"]
    batch = admin.post("/v1/jobs:batch", json={"jobs": [SPEC, asked]}).json()["errors"]
    assert [error["path"] for error in batch] == [f"jobs.1.{path}" for path in paths]
    sweep = admin.post("/v1/jobs", json=asked | {"sweep": {"grid": {"seed": [1, 2]}}}).json()["errors"]
    assert [error["path"] for error in sweep] == paths
    draft = admin.post("/v1/jobs:check", json={"text": json.dumps(asked)}).json()["errors"]
    assert [error["path"] for error in draft] == paths
    for taken in (receiver.url, "https://nobody.invalid/"):
        assert admin.post("/v1/jobs", json=SPEC | {"notify": {"webhook": taken}}).status_code == 201


@pytest.mark.slow
def test_what_was_noted_while_no_api_ran_is_told_by_the_next_one(
    alone: str, tmp_path: Path, receiver: Receiver
) -> None:
    """Also what one that was killed had taken and not sent."""
    settings = Settings(data=tmp_path, redis_url=SecretStr(alone), webhook_allow="127.0.0.1")
    with serving(settings) as first:
        with first.client("ada") as ada:
            job = ada.post("/v1/jobs", json=SPEC).json()["id"]
        _, secret = first.store.webhooks.create(receiver.url, ["cancelled"], [], project=None, by="root")
        store = first.store
    assert receiver.taken == []
    store.jobs.cancel(job)
    assert store.webhooks.make_deliveries(10) == 1
    assert [each.delivery.event.data.job for each in store.webhooks.due(10)] == [job]
    assert store.webhooks.due(10) == []
    with redis_py.Redis.from_url(alone) as redis:
        make_due(redis)
    with serving(settings):
        headers, body = eventually(lambda: receiver.taken and receiver.taken[0])
    assert verify(secret, headers, body).data.job == job


def test_a_note_that_cannot_be_read_keeps_back_no_other(
    admin: httpx2.Client, receiver: Receiver, redis: redis_py.Redis
) -> None:
    """A host may have written anything there, and one of a newer version what is not known here."""
    read = {"job": "job_0", "state": "failed", "url": receiver.url, "time": 1}
    for odd in (read | {"metric": {"value": "odd"}}, read | {"format": "newer"}, {"job": "job_0"}, 3):
        redis.xadd(WEBHOOK_CHANGES(), {"d": json.dumps(odd)})
    create(admin, receiver.url)
    job = run_and_cancel(admin)
    _, body = eventually(lambda: receiver.taken and receiver.taken[0])
    assert told_by(body) == ("job.cancelled", job)
    eventually(lambda: not redis.xlen(WEBHOOK_CHANGES()))


def test_a_receiver_that_does_not_answer_keeps_no_other_waiting(alone: str, tmp_path: Path, receiver: Receiver) -> None:
    settings = Settings(data=tmp_path, redis_url=SecretStr(alone), webhook_allow="127.0.0.1")
    store = Store.connect(settings.broker_url, settings.layout)
    change = {"job": "job_0", "kind": "train", "name": "", "owner": "ada", "state": "failed", "attempt": 1, "time": 1}
    asked: list[socket.socket] = []
    unread = json.dumps({"id": "msg_0", "event": {}, "format": "newer"})

    async def send(slow: str) -> None:
        sender = WebhookSender(settings, store, SenderTimes(answer_s=300.0))
        sender._slow.add(slow)
        sender.start()
        await asyncio.to_thread(eventually, lambda: receiver.taken)
        assert sender._client.timeout.read == 300.0, "by default, HTTP would wait for 5 s"
        await sender.stop()

    with socket.create_server(("127.0.0.1", 0)) as mute, redis_py.Redis.from_url(alone, decode_responses=True) as redis:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        for project, url in (("red", f"http://{address}/"), ("blue", receiver.url)):
            hook, _ = store.webhooks.create(url, ["failed"], [], project=project, by="root")
            noted = str(redis.xadd(WEBHOOK_CHANGES(), {"d": ""}))
            stubs.make_deliveries(store.client, noted, 10_000, 9, hook.id, "0", unread)
        for project in (*["red"] * 50, "blue"):
            redis.xadd(WEBHOOK_CHANGES(), {"d": json.dumps(change | {"project": project})})
        asyncio.run(send(address))
        mute.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                asked.append(mute.accept()[0])
    for connection in asked:
        connection.close()
    assert len(asked) <= 16
    store.close()


@pytest.mark.slow
def test_two_processes_send_each_delivery_once(alone: str, tmp_path: Path, receiver: Receiver) -> None:
    settings = Settings(data=tmp_path, redis_url=SecretStr(alone), webhook_allow="127.0.0.1")
    with serving(settings) as one, serving(settings):
        one.store.webhooks.create(receiver.url, ["queued"], [], project=None, by="root")
        with one.client("ada") as ada:
            jobs = {ada.post("/v1/jobs", json=SPEC).json()["id"] for _ in range(20)}
        with redis_py.Redis.from_url(alone) as redis:
            eventually(lambda: len(receiver.taken) >= 20 and redis.zcard(WEBHOOK_DUE()) == 0)
    assert sorted(told_by(body)[1] for _, body in receiver.taken) == sorted(jobs)


@pytest.mark.slow
def test_a_webhook_that_fails_for_days_is_disabled(
    admin: httpx2.Client, service: Service, receiver: Receiver, redis: redis_py.Redis
) -> None:
    receiver.answers = [503]
    hook = create(admin, receiver.url)
    redis.hset(WEBHOOKS_FAILING(), hook["id"], 1)
    run_and_cancel(admin)
    found = eventually(lambda: (now := admin.get("/v1/webhooks").json()["items"][0])["disabled_at"] and now)
    assert found["states"] == hook["states"]
    sent = len(receiver.taken)
    run_and_cancel(admin)
    eventually(lambda: redis.xlen("trivet:webhook:changes") == 0)
    make_due(redis)
    eventually(lambda: redis.zcard(WEBHOOK_DUE()) == 0)
    assert len(receiver.taken) == sent
    newest = admin.get(f"/v1/webhooks/{hook['id']}/deliveries").json()["items"][0]
    assert (newest["state"], newest["error"]) == ("failed", "the webhook is disabled")


@pytest.mark.slow
def test_a_webhook_is_its_projects_alone(admin: httpx2.Client, service: Service, receiver: Receiver) -> None:
    secret = service.store.keys.create("ada", ["admin"], "default")[1]
    with httpx2.Client(base_url=service.url, headers={"Authorization": f"Bearer {secret}"}, timeout=300.0) as ada:
        everybody = create(admin, receiver.url)
        mine = create(ada, receiver.url)
        assert (everybody["project"], mine["project"]) == (None, "default")
        assert [each["id"] for each in ada.get("/v1/webhooks").json()["items"]] == [mine["id"]]
        assert ada.get(f"/v1/webhooks/{everybody['id']}/deliveries").status_code == 404
        assert ada.delete(f"/v1/webhooks/{everybody['id']}").status_code == 404
        assert ada.post("/v1/webhooks", json={"url": receiver.url, "project": "other"}).status_code == 422
        assert ada.delete(f"/v1/webhooks/{mine['id']}").status_code == 204
        assert admin.delete(f"/v1/webhooks/{everybody['id']}").status_code == 204
    assert service.store.client.call("KEYS", "trivet:webhook*") == []
    with service.client("bob") as bob:
        assert bob.get("/v1/webhooks").status_code == 403


UNABLE: list[tuple[dict[str, Any], str]] = [
    ({"url": "ftp://example.org/"}, "url"),
    ({"url": "https:///path"}, "url"),
    ({"url": "https://user:secret@example.org/"}, "url"),
    ({"url": "https://example.org:99999/"}, "url"),
    ({"url": "https://10.0.0.1/"}, "url"),
    ({"url": "https://example.org/", "kinds": ["nothing"]}, "kinds.0"),
    ({"url": "https://example.org/", "states": ["done"]}, "states.0"),
]


"""Webhooks, and what is wrong with each."""


def test_a_webhook_that_cannot_work_is_refused(admin: httpx2.Client) -> None:
    for fields, path in UNABLE:
        answer = admin.post("/v1/webhooks", json=fields)
        assert answer.status_code == 422, fields
        assert [error["path"] for error in answer.json()["errors"]] == [path]


@pytest.mark.slow
def test_the_document_describes_what_receivers_get(admin: httpx2.Client, service: Service) -> None:
    document = service_document(admin)
    told = document["webhooks"]["job"]["post"]
    assert told["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/WebhookEvent")
    assert "secret" not in document["components"]["schemas"]["Webhook"]["properties"]
    assert "secret" not in document["components"]["schemas"]["JobChange"]["properties"]


def service_document(client: httpx2.Client) -> dict[str, Any]:
    document: dict[str, Any] = client.get("/openapi.json").json()
    return document
