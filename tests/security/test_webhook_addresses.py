"""Where webhooks may lead, and how a receiver tells that a delivery is true."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py
from pydantic import SecretStr
from serving import serving
from waiting import eventually
from webhook_receiver import Receiver
from webhook_service import SPEC, notices

from api.deliveries import ForbiddenTarget, WebhookAddress, vetted
from api.deliveries.addresses import is_public, may_reach
from service.jobs.kinds.registry import spec_adapter
from service.jobs.records.webhooks import new_secret, sign
from service.jobs.settings import Settings
from service.jobs.spec.common import WebhookFormat, check_receiver
from service.jobs.store.keyspace import WEBHOOKS
from trivet.webhooks import InvalidDelivery, verify


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
        "255.255.255.255", "224.0.0.1", "198.18.0.1", "192.0.2.1", "::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254",
        "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b::7f00:1", "2002:7f00:1::",
        "2002:a00:1::", "2001:db8::1", "fec0::1", "192.0.0.8", "192.0.0.100", "192.88.99.1", "3fff::1", "5f00::1",
    ],
)  # fmt: skip
def test_addresses_inside_are_not_reached(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
    assert not may_reach(address, "https", [])
    assert may_reach(address, "http", [ipaddress.ip_network(address)])


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "::ffff:8.8.8.8"])
def test_public_addresses_are_reached_over_tls_alone(address: str) -> None:
    assert may_reach(address, "https", [])
    assert not may_reach(address, "http", [])


def test_a_name_of_an_inner_address_is_refused_when_it_is_resolved() -> None:
    for url in (
        "https://localhost/",
        "https://127.0.0.1/",
        "https://[::1]/",
        "https://0x7f000001/",
        "https://2130706433/",
    ):
        check_receiver(url, "standard")
        with pytest.raises((ForbiddenTarget, OSError)):
            asyncio.run(vetted(url, []))
    found = asyncio.run(
        vetted("http://localhost:81/x", [ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1")])
    )
    assert (found.host, found.port, found.authority) == ("localhost", 81, "localhost:81")
    assert WebhookAddress("::1", "localhost", 443, "https").url == "https://[::1]:443"


def test_a_webhook_to_an_inner_address_is_not_sent_and_says_why(
    broker: str, redis: redis_py.Redis, tmp_path: Path, receiver: Receiver
) -> None:
    """Nor is one to what no name server can be asked for, which settings may name."""
    mail: dict[str, Any] = {
        "smtp_url": SecretStr("smtp+plain://a..b"),
        "smtp_from": "trivet@example.org",
        "smtp_to": "ada@example.org",
    }
    with serving(Settings(data=tmp_path, redis_url=SecretStr(broker), **mail)) as running:
        hooks = running.store.webhooks
        targets: list[tuple[str, WebhookFormat]] = [
            (receiver.url, "standard"),
            ("https://a..b/", "standard"),
            ("mailto:ada@example.org", "email"),
        ]
        made = [hooks.create(url, ["queued"], [], project=None, by="root", form=form)[0].id for url, form in targets]
        with running.client("ada") as ada:
            ada.post("/v1/jobs", json=SPEC)

        def errors_of(hook: str) -> list[str | None]:
            return [each.error for each in hooks.deliveries(hook, 9) if each.attempts]

        inner, nowhere, mailed = [eventually(partial(errors_of, hook))[0] for hook in made]
        with running.client("ada") as ada:
            asking = SPEC | {"notify": {"webhook": receiver.url, "on": ["queued"]}}  # as by a name that led elsewhere
            job = running.store.jobs.submit(spec_adapter.validate_python(asking), "ada")[0].id
            (notice,) = notices(ada, job, 1)
    assert "nor in TRIVET_WEBHOOK_ALLOW" in (inner or "")
    assert "expected an https:// URL with a host in ASCII" in (nowhere or "")
    assert "UnicodeError" in (mailed or "")
    assert (notice["state"], "nor in TRIVET_WEBHOOK_ALLOW" in notice["error"]) == ("failed", True)
    assert receiver.taken == []
    assert redis.hlen(WEBHOOKS()) == 3


Change = Callable[[dict[str, str], bytes], tuple[dict[str, str], bytes]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda headers, body: (headers, body + b" "), "signature"),
        (lambda headers, body: (headers | {"webhook-id": "msg_other"}, body), "signature"),
        (lambda headers, body: (headers | {"webhook-timestamp": "1700000000"}, body), "not within"),
        (lambda headers, body: (headers | {"webhook-timestamp": "now"}, body), "not within"),
        (lambda headers, body: (headers | {"webhook-signature": "v1,AAAA"}, body), "signature"),
        (lambda headers, body: ({"webhook-id": headers["webhook-id"]}, body), "no header webhook-timestamp"),
    ],
)
def test_what_was_changed_on_the_way_is_not_believed(change: Change, said: str) -> None:
    secret, body, now = new_secret(), b'{"type": "x"}', int(time.time())
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(now),
        "webhook-signature": sign(secret, "msg_1", now, body),
    }
    with pytest.raises(InvalidDelivery, match=said):
        verify(secret, *change(headers, body))
    with pytest.raises(InvalidDelivery, match="signature"):
        verify(new_secret(), headers, body)


def test_the_signature_is_that_of_standard_webhooks() -> None:
    """The example of their libraries' own tests."""
    signature = sign(
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
    )
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
