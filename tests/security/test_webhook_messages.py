"""Messages for people: a text for chats, and e-mail through the operator's server to whom the operator allows."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
import redis as redis_py
from mail_receiver import MailReceiver, mail_receiver
from own_broker import own_broker
from pydantic import SecretStr, ValidationError
from serving import Service, serving
from waiting import eventually
from webhook_receiver import Receiver
from webhook_service import SPEC

from api.deliveries.webhooks import SenderTimes, WebhookSender
from service.jobs.records.webhooks import WebhookDelivery
from service.jobs.settings import Settings
from service.jobs.store import Store
from service.jobs.store.keyspace import WEBHOOK_DUE
from service.jobs.store.webhooks import DueDelivery

__all__ = ["own_broker"]  # the file's service lives as long as its tests
MAIL: dict[str, Any] = {"smtp_from": "trivet@example.org", "smtp_to": "ada@example.org, @lab.example"}


@pytest.fixture(scope="module")
def mailbox() -> Iterator[MailReceiver]:
    with mail_receiver() as receiving:
        yield receiving


@pytest.fixture(scope="module")
def service(broker: str, tmp_path_factory: pytest.TempPathFactory, mailbox: MailReceiver) -> Iterator[Service]:
    data, mail = tmp_path_factory.mktemp("data"), SecretStr(f"smtp+plain://127.0.0.1:{mailbox.port}")
    settings = Settings(data=data, redis_url=SecretStr(broker), webhook_allow="127.0.0.0/8", smtp_url=mail, **MAIL)
    with serving(settings) as running:
        yield running


@pytest.fixture
def client(service: Service, redis: redis_py.Redis) -> Iterator[httpx2.Client]:
    key = {"Authorization": f"Bearer {service.store.keys.create('root', ['admin'])[1]}"}
    with httpx2.Client(base_url=service.url, headers=key, timeout=300.0) as found:
        yield found


def run_and_cancel(client: httpx2.Client, **changes: object) -> str:
    answer = client.post("/v1/jobs", json={**SPEC, **changes})
    assert answer.status_code == 201, answer.text
    job: str = answer.json()["id"]
    assert client.post(f"/v1/jobs/{job}/cancel").is_success
    return job


def test_a_chat_gets_a_text_that_addresses_nobody_and_a_person_one_mail(
    client: httpx2.Client, receiver: Receiver, mailbox: MailReceiver, redis: redis_py.Redis
) -> None:
    hook = client.post("/v1/webhooks", json={"url": receiver.url, "format": "slack"}).json()
    assert client.get("/v1/webhooks").json()["items"][0]["format"] == hook["format"] == "slack"
    mailbox.refusals.append(b"451 later\r\n")
    notify = {"webhook": "mailto:bob@lab.example", "format": "email"}
    job = run_and_cancel(client, name="<!channel> mine", notify=notify)
    eventually(lambda: receiver.taken)
    body = json.loads(receiver.taken[0][1])
    assert list(body) == ["text"]
    assert body["text"].startswith("train job &lt;!channel&gt; mine cancelled\njob: ")

    def tried() -> object:
        found = client.get(f"/v1/jobs/{job}/notices").json()["items"]
        return found and found[0]["error"]

    assert "451" in str(eventually(tried))
    for name in redis.zrange(WEBHOOK_DUE(), 0, -1):
        redis.zadd(WEBHOOK_DUE(), {name: 1}, xx=True)
    eventually(lambda: mailbox.taken)
    ((recipient, mail),) = mailbox.taken
    assert (recipient, mail["From"], mail["To"]) == ("bob@lab.example", "trivet@example.org", "bob@lab.example")
    assert mail["Subject"] == "Trivet: train job <!channel> mine cancelled"
    assert f"job: {job}" in mail.get_content().splitlines()


@pytest.mark.parametrize(
    ("url", "form", "expected"),
    [
        ("mailto:ada@example.com", "email", "one of ada@example.org, @lab.example, whom TRIVET_SMTP_TO allows"),
        ("mailto:ada@lab.example?bcc=x@evil.example", "email", "one address, such as mailto:ada@example.org"),
        ("https://example.org/", "email", "one address, such as mailto:ada@example.org"),
        ("mailto:ada@example.org", "slack", "an https:// URL with a host"),
        ("https://example.org/\u0001", "standard", "an https:// URL with a host in ASCII, with 1 to 63 characters"),
        ("https://a..b/", "standard", "an https:// URL with a host in ASCII, with 1 to 63 characters"),
        ("https://münchen.de/x", "standard", "an https:// URL with a host in ASCII (here xn--mnchen-3ya.de)"),
    ],
)
def test_who_is_not_allowed_is_sent_nothing(client: httpx2.Client, url: str, form: str, expected: str) -> None:
    asked = {"notify": {"webhook": url, "format": form}}
    for path, body in (("/v1/jobs", {**SPEC, **asked}), ("/v1/webhooks", {"url": url, "format": form})):
        answer = client.post(path, json=body)
        assert answer.status_code == 422
        (error,) = answer.json()["errors"]
        assert error["path"] in ("notify.webhook", "url")
        assert error["expected"].startswith(expected)


def test_a_mail_server_that_says_nothing_keeps_no_thread_of_the_event_loop(tmp_path: Path) -> None:
    """These end the streams of revoked keys."""
    change = {"job": "job_0", "name": "", "kind": "train", "owner": "ada", "project": "default"}
    event = {"type": "job.failed", "timestamp": 0, "data": {**change, "state": "failed", "attempt": 1}}
    delivery = WebhookDelivery.model_validate({"id": "msg_0", "event": event})
    due = DueDelivery("job_0", "mailto:ada@example.org", "", delivery, format="email")

    async def sent_meanwhile(port: int) -> list[bool]:
        mail = SecretStr(f"smtp+plain://127.0.0.1:{port}")
        sender = WebhookSender(
            Settings(data=tmp_path, smtp_url=mail, **MAIL), cast(Store, None), SenderTimes(answer_s=2)
        )
        sending = [asyncio.create_task(sender._send(due, datetime.now(UTC))) for _ in range(40)]
        await asyncio.sleep(0)
        await asyncio.to_thread(bool)
        done = [task.done() for task in sending]
        await sender.stop()
        await asyncio.gather(*sending, return_exceptions=True)
        return done

    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert not any(asyncio.run(sent_meanwhile(mute.getsockname()[1])))


def test_a_service_without_a_mail_server_says_so(broker: str, redis: redis_py.Redis, tmp_path: Path) -> None:
    with serving(Settings(data=tmp_path, redis_url=SecretStr(broker))) as running:
        key = {"Authorization": f"Bearer {running.store.keys.create('root', ['admin'])[1]}"}
        notify = {"webhook": "mailto:ada@example.org", "format": "email"}
        answer = httpx2.post(f"{running.url}/v1/jobs", json={**SPEC, "notify": notify}, headers=key, timeout=60)
        assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, "notify.webhook")
        assert "TRIVET_SMTP_URL is not set" in answer.json()["errors"][0]["expected"]
    for url, rest, missing in (
        ("smtps://host", {}, "smtp_from is missing"),
        ("https://host", MAIL, "smtp_url names no mail server"),
        ("smtp+plain://me:secret@host", MAIL, "smtp_url has a password"),
    ):
        with pytest.raises(ValidationError, match=missing) as refused:
            Settings(data=tmp_path, smtp_url=SecretStr(url), **rest)
        assert "secret" not in str(refused.value)
