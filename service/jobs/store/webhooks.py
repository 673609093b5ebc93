"""Keeps webhooks and their deliveries: they are made from the scripts' notes about jobs, sent by any process
that takes them, and never lost.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import ValidationError

from service.jobs.records import NotFound
from service.jobs.records.webhooks import JobChange, Webhook, WebhookDelivery, WebhookEvent, new_secret
from service.jobs.spec.common import JobState, WebhookFormat
from service.jobs.store import decode, stubs
from service.jobs.store.client import BrokerClient
from service.jobs.store.decode import json_of
from service.jobs.store.keyspace import (
    CLOCK,
    WEBHOOK_CHANGES,
    WEBHOOK_DELIVERIES,
    WEBHOOK_DELIVERY,
    WEBHOOK_DUE,
    WEBHOOK_SECRETS,
    WEBHOOKS,
    WEBHOOKS_FAILING,
    WEBHOOKS_PRESENT,
)

log = logging.getLogger(__name__)
_MOST = 100
_MOST_DELIVERIES = 200
"""Number of deliveries kept of each webhook, the newest ones."""
_KEEP_S = 30 * 86_400.0
_HOLD_S = 60.0
"""After so long, another process sends a delivery that was taken and not ended."""


@dataclass(frozen=True)
class DueDelivery:
    """A delivery for its caller to send now. ``sender`` is the id of a webhook, or of a job whose spec asks for
    it.
    """

    sender: str
    url: str
    secret: str
    delivery: WebhookDelivery
    is_disabled: bool = False
    format: WebhookFormat = "standard"


@dataclass(frozen=True)
class Webhooks:
    """Every step is atomic: a noted change leads to deliveries, each of which is sent at least once."""

    client: BrokerClient

    def create(
        self,
        url: str,
        states: Sequence[JobState],
        kinds: Sequence[str],
        *,
        project: str | None,
        by: str,
        form: WebhookFormat = "standard",
    ) -> tuple[Webhook, str]:
        """Keep a webhook; return it and the secret that signs its deliveries. Raises :class:`Conflict` if there
        are too many.
        """
        webhook_id, secret = f"hook_{secrets.token_hex(8)}", new_secret()
        entry = {
            "id": webhook_id, "url": url, "project": project, "states": list(states), "kinds": list(kinds),
            "created_at": time.time(), "created_by": by, "disabled_at": None, "secret": secret, "format": form,
        }  # fmt: skip
        stubs.add_webhook(self.client, webhook_id, json_of(entry), _MOST)
        return _webhook(entry), secret

    def exist(self) -> bool:
        """Return whether there is anything to deliver, or may be; this writes nothing, unlike a script that
        reads the clock.
        """
        return bool(self.client.call("EXISTS", WEBHOOKS_PRESENT(), WEBHOOK_CHANGES(), WEBHOOK_DUE()))

    def get(self, webhook_id: str) -> Webhook:
        """Return one. Raises :class:`NotFound`."""
        text = self.client.call("HGET", WEBHOOKS(), webhook_id)
        if text is None:
            raise NotFound(f"there is no webhook {webhook_id}")
        return _webhook(orjson.loads(text), self.client.call("HGETALL", WEBHOOKS_FAILING()))

    def delete(self, webhook_id: str) -> None:
        """Forget one with its deliveries. Raises :class:`NotFound`."""
        stubs.delete_webhook(self.client, webhook_id)

    def deliveries(self, webhook_id: str, limit: int) -> list[WebhookDelivery]:
        """Return the newest deliveries of a webhook, newest first. Raises :class:`NotFound`."""
        self.get(webhook_id)
        return self.notices(webhook_id, limit)

    def notices(self, sender: str, limit: int) -> list[WebhookDelivery]:
        """Return the newest deliveries requested by the spec of a job, newest first."""
        ids = self.client.call("ZRANGE", WEBHOOK_DELIVERIES(sender), 0, limit - 1, "REV")
        texts = self.client.call("MGET", *(WEBHOOK_DELIVERY(sender, each) for each in ids)) if ids else []
        return [WebhookDelivery.model_validate_json(text) for text in texts if text is not None]

    def secret(self, project: str) -> str:
        """Return the secret that signs the notices to the receivers in specs of a project's jobs; the first
        call makes it.
        """
        self.client.call("HSETNX", WEBHOOK_SECRETS(), project, new_secret())
        return str(self.client.call("HGET", WEBHOOK_SECRETS(), project))

    def renew_secret(self, project: str) -> str:
        """Replace the secret of a project; return the new one, which signs everything from now on."""
        secret = new_secret()
        self.client.call("HSET", WEBHOOK_SECRETS(), project, secret)
        return secret

    def make_deliveries(self, most: int) -> int:
        """Turn up to ``most`` noted changes into deliveries; return their number."""
        changes = self.client.call("XRANGE", WEBHOOK_CHANGES(), "-", "+", "COUNT", most)
        hooks = self.list() if changes else []
        for change_id, fields in changes:
            pieces: list[str] = []
            try:
                for sender, delivery in _deliveries(change_id, orjson.loads(fields["d"]), hooks):
                    pieces += (sender, delivery.id, delivery.model_dump_json())
            except Exception as error:  # a host, or a newer version, may have noted anything; others wait behind it
                log.warning("a noted change cannot be read, and nobody is told of it: %r", error)
                pieces = []
            stubs.make_deliveries(self.client, change_id, round(_KEEP_S * 1000), _MOST_DELIVERIES, *pieces)
        return len(changes)

    def due(self, most: int) -> list[DueDelivery]:
        """Take up to ``most`` deliveries to send; no other process gets them for a minute."""
        flat = stubs.due_deliveries(self.client, most, round(_HOLD_S * 1000))
        taken = []
        for sender, text, kept in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
            try:
                delivery = WebhookDelivery.model_validate_json(kept)
            except ValidationError as error:  # a newer version may have written it, and will send it
                log.warning("a delivery of %s cannot be read, and is not sent: %r", sender, error)
                continue
            if delivery.url is not None:
                secret = self.secret(delivery.event.data.project)
                taken.append(DueDelivery(sender, delivery.url, secret, delivery, format=delivery.format))
            elif text:
                entry = orjson.loads(text)
                disabled = entry["disabled_at"] is not None
                form = entry.get("format", "standard")
                taken.append(DueDelivery(sender, entry["url"], entry["secret"], delivery, disabled, form))
        return taken

    def put_back(self, taken: Sequence[DueDelivery], after_s: float) -> None:
        """Let deliveries that were taken and not sent be due again after some seconds."""
        due_ms = int(self.client.call("HGET", CLOCK(), "now")) + round(after_s * 1000)
        words: list[int | str] = []
        for each in taken:
            words += (due_ms, f"{each.sender}:{each.delivery.id}")
        self.client.call("ZADD", WEBHOOK_DUE(), "XX", *words)

    def list(self) -> list[Webhook]:
        """Return all webhooks, oldest first."""
        failing = self.client.call("HGETALL", WEBHOOKS_FAILING())
        found = [_webhook(orjson.loads(text), failing) for text in self.client.call("HVALS", WEBHOOKS())]
        return sorted(found, key=lambda webhook: (webhook.created_at, webhook.id))

    def note(self, webhook_id: str, delivery: WebhookDelivery, again_s: float | None, disable_s: float) -> bool:
        """Record an attempt to send a delivery, which is due again after ``again_s`` seconds; return whether
        its webhook is now disabled because all its deliveries have failed for ``disable_s``.
        """
        is_disabled = stubs.note_delivery(
            self.client,
            webhook=webhook_id,
            delivery=delivery.id,
            text=delivery.model_dump_json(),
            again_ms=0 if again_s is None else max(1, round(again_s * 1000)),
            succeeded=int(delivery.state == "delivered"),
            disable_ms=round(disable_s * 1000),
        )
        return bool(is_disabled)


def _webhook(entry: dict[str, Any], failing: dict[str, str] | None = None) -> Webhook:
    since = (failing or {}).get(entry["id"])
    disabled = entry["disabled_at"]
    return Webhook(
        id=entry["id"],
        url=entry["url"],
        project=entry["project"],
        states=tuple(entry["states"]),
        kinds=tuple(entry["kinds"] or ()),
        format=entry.get("format", "standard"),
        created_at=decode.moment(entry["created_at"] * 1000),
        created_by=entry["created_by"],
        failing_since=None if since is None else decode.moment(since),
        disabled_at=None if disabled is None else decode.moment(disabled * 1000),
    )


def _deliveries(
    change_id: str, noted: dict[str, Any], hooks: Sequence[Webhook]
) -> Iterator[tuple[str, WebhookDelivery]]:
    """Yield the senders that tell of a noted change, each with its delivery."""
    event, url = _event(noted), noted.get("url")
    senders = [webhook.id for webhook in hooks if webhook.wants(event.data)]
    for sender in (*senders, *([event.data.job] if url else [])):
        asked = url if sender == event.data.job else None
        form = noted.get("format", "standard") if asked else "standard"
        yield (
            sender,
            WebhookDelivery(id=f"msg_{sender.partition('_')[2]}_{change_id}", event=event, url=asked, format=form),
        )


def _event(noted: dict[str, Any]) -> WebhookEvent:
    change = JobChange.model_validate({name: noted[name] for name in noted if name not in ("time", "url", "format")})
    what = change.state if change.metric is None else "metric"
    return WebhookEvent(type=f"job.{what}", timestamp=decode.moment(noted["time"] * 1000), data=change)
