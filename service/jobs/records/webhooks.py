"""Defines webhooks: the changes that they report, their signature, and when a delivery is tried again.

Headers and signatures are those of Standard Webhooks (https://www.standardwebhooks.com).
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pydantic import Field

from service.jobs.records import FrozenModel
from service.jobs.spec.common import JobState, WebhookFormat

SECRET_PREFIX = "whsec_"  # noqa: S105 - what secrets begin with
ID_HEADER, TIME_HEADER, SIGNATURE_HEADER = "webhook-id", "webhook-timestamp", "webhook-signature"

DeliveryState = Literal["pending", "delivered", "failed"]


class Webhook(FrozenModel):
    """A webhook: its URL, and the jobs whose changes it reports."""

    id: str
    url: str
    project: str | None = Field(description="project of the reported jobs; null, for an operator's webhook, means all")
    states: tuple[JobState, ...] = Field(description="the states that are reported")
    kinds: tuple[str, ...] = Field((), description="the kinds of jobs that are reported; empty for all")
    format: WebhookFormat = Field("standard", description="the form of its deliveries")
    created_at: datetime
    created_by: str
    failing_since: datetime | None = Field(None, description="time since which every delivery has failed")
    disabled_at: datetime | None = Field(
        None, description="when it was disabled because its deliveries failed for long; delete it and make another"
    )

    def wants(self, change: JobChange) -> bool:
        """Return whether this webhook reports a change."""
        return (
            self.disabled_at is None
            and self.project in (None, change.project)
            and change.metric is None
            and change.state in self.states
            and (not self.kinds or change.kind in self.kinds)
        )


class ReachedThreshold(FrozenModel):
    """The first number of a job that meets a threshold of its spec."""

    name: str = Field(description="the metric, or the path of a number of the result")
    value: float
    threshold: str = Field(description="the threshold, as the spec has it", examples=[">= 0.9"])
    step: int | None = Field(None, description="step of the metric; null for a number of the result")


class JobChange(FrozenModel):
    """A reported change of a job: a new state, or a number that has reached a threshold."""

    job: str
    name: str
    kind: str
    owner: str
    project: str
    state: JobState
    attempt: int
    reason: str | None = None
    metric: ReachedThreshold | None = Field(None, description="the number that reached a threshold, else null")


class WebhookEvent(FrozenModel):
    """The body of a delivery."""

    type: str = Field(
        description="`job.` and the new state; `job.metric` where a number has reached a threshold",
        examples=["job.succeeded"],
    )
    timestamp: datetime
    data: JobChange


class WebhookDelivery(FrozenModel):
    """One event for one webhook, and the outcome of sending it."""

    id: str = Field(description="id of the delivery, the same however often it is sent: `webhook-id`")
    event: WebhookEvent
    url: str | None = Field(None, description="the URL from the job's own spec, else null")
    format: WebhookFormat = Field("standard", description="the form from the job's own spec")
    state: DeliveryState = "pending"
    attempts: int = 0
    first_at: datetime | None = Field(None, description="when it was first sent")
    last_at: datetime | None = Field(None, description="when it was last sent")
    next_at: datetime | None = Field(None, description="when it is sent again")
    status: int | None = Field(None, description="the last HTTP status that came back")
    error: str | None = Field(None, description="why it failed the last time")


@dataclass(frozen=True)
class RetrySchedule:
    """Doubles the pause after each failure, with jitter so that receivers which come back are not flooded."""

    total_s: float
    """No attempt begins later than this after the first one."""
    first_s: float = 5.0
    longest_s: float = 3600.0

    def pause(self, attempts: int, passed_s: float, chance: float) -> float | None:
        """Return seconds until the next attempt, ``None`` when there is none. ``chance`` is uniform on [0, 1)."""
        doubled = self.longest_s if attempts > 30 else min(self.longest_s, self.first_s * 2 ** (attempts - 1))
        pause = doubled * (0.5 + chance)
        return pause if passed_s + pause <= self.total_s else None


def new_secret() -> str:
    """Return 256 random bits as Standard Webhooks writes them."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def sign(secret: str, delivery: str, timestamp: int, body: bytes) -> str:
    """Return the signature of a delivery's id, time and body. Raises ``ValueError`` for an invalid secret."""
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error:
        key = b""
    if not key or not secret.startswith(SECRET_PREFIX):
        raise ValueError(f"not a webhook's secret: it begins with {SECRET_PREFIX}, and Base64 follows")
    digest = hmac.digest(key, f"{delivery}.{timestamp}.".encode() + body, "sha256")
    return "v1," + base64.b64encode(digest).decode()


Webhook.model_rebuild()
