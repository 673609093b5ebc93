"""Verifies webhook deliveries, and provides the client's calls about webhooks."""

from __future__ import annotations

import hmac
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from service.jobs.records.webhooks import (
    ID_HEADER,
    SIGNATURE_HEADER,
    TIME_HEADER,
    Webhook,
    WebhookDelivery,
    WebhookEvent,
    sign,
)
from service.jobs.spec.common import JobState, WebhookFormat
from trivet.connection import Connection

TOLERANCE_S = 300.0


class InvalidDelivery(Exception):  # noqa: N818
    """A request is not a delivery of this webhook, or repeats an old one; ignore its content."""


def verify(secret: str, headers: Mapping[str, str], body: bytes, *, tolerance_s: float = TOLERANCE_S) -> WebhookEvent:
    """Return the event of a request that a webhook received; ``body`` is the raw bytes.

    Raises :class:`InvalidDelivery` unless it was signed with ``secret`` within ``tolerance_s`` seconds of now.
    The same delivery may come more than once, with the same ``webhook-id``.
    """
    given = {name.lower(): value for name, value in headers.items()}
    missing = [name for name in (ID_HEADER, TIME_HEADER, SIGNATURE_HEADER) if name not in given]
    if missing:
        raise InvalidDelivery(f"no header {', '.join(missing)}")
    timestamp = given[TIME_HEADER]
    if not (timestamp.isascii() and timestamp.isdecimal()) or abs(time.time() - int(timestamp)) > tolerance_s:
        raise InvalidDelivery(f"{TIME_HEADER} {timestamp[:40]!r} is not within {tolerance_s:g} s of now")
    expected = sign(secret, given[ID_HEADER], int(timestamp), body)
    if not any(hmac.compare_digest(expected.encode(), each.encode()) for each in given[SIGNATURE_HEADER].split()):
        raise InvalidDelivery("the signature does not match this secret and this body")
    return WebhookEvent.model_validate_json(body)


@dataclass(frozen=True)
class WebhooksResource:
    """Webhooks; all but :meth:`secret` needs an admin key, of a project or an operator's."""

    connection: Connection

    def create(
        self,
        url: str,
        *,
        states: Sequence[JobState] | None = None,
        kinds: Sequence[str] = (),
        project: str | None = None,
        format: WebhookFormat = "standard",  # noqa: A002 - the field's name
    ) -> tuple[Webhook, str]:
        """Create a webhook; return it and its secret, which is shown only once."""
        body = {"url": url, "kinds": list(kinds), "project": project, "format": format}
        answer = self.connection.json("POST", "/v1/webhooks", json=body | ({"states": list(states)} if states else {}))
        return Webhook.model_validate(answer), answer["secret"]

    def deliveries(self, webhook_id: str, limit: int = 50) -> list[WebhookDelivery]:
        """List the newest deliveries, newest first."""
        return self.connection.listed(WebhookDelivery, f"{_path(webhook_id)}/deliveries", params={"limit": limit})

    def list(self) -> list[Webhook]:
        return self.connection.listed(Webhook, "/v1/webhooks")

    def secret(self, *, project: str | None = None, renew: bool = False) -> str:
        """Return the secret that signs the deliveries of ``notify`` in a project's jobs; with ``renew``,
        replace it by a new one, which needs an admin key.
        """
        verb, path = ("POST", "/v1/webhooks/secret/renew") if renew else ("GET", "/v1/webhooks/secret")
        secret: str = self.connection.json(verb, path, params={"project": project})["secret"]
        return secret

    def delete(self, webhook_id: str) -> None:
        self.connection.json("DELETE", _path(webhook_id))


def _path(webhook_id: str) -> str:
    return f"/v1/webhooks/{quote(webhook_id, safe='')}"
