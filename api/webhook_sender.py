"""Sends webhooks from an API process. Every process may: the broker gives each delivery to one of them at a time."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import urlsplit

import httpx2

from api.webhook_address import ForbiddenTarget, vetted
from service.jobs.settings import Settings
from service.jobs.store import Store, StoreUnavailable
from service.jobs.store.webhooks import DueDelivery
from service.jobs.webhooks import ID_HEADER, SIGNATURE_HEADER, TIME_HEADER, RetrySchedule, WebhookDelivery, sign

_AT_ONCE = 16
_DAY_S = 86_400.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SenderTimes:
    """Says how long a sender waits, in seconds."""

    look_s: float = 1.0
    """Pause between two looks for what is to be sent."""
    answer_s: float = 10.0
    """Limit on the whole of a receiver's answer."""
    outage_s: float = 5.0
    """Pause after the broker was found away."""


@dataclass(frozen=True)
class _Outcome:
    """The status that came back, if any, and why that is a failure, if it is."""

    status: int | None
    error: str | None
    is_forbidden: bool = False
    """Whether the URL leads where none may."""


class WebhookSender:
    """A task of the process's event loop."""

    def __init__(self, settings: Settings, store: Store, times: SenderTimes = SenderTimes()) -> None:
        self._store, self._times = store, times
        self._allowed = [ipaddress.ip_network(each) for each in settings.webhook_networks]
        self._schedule = RetrySchedule(settings.webhook_retry_hours * 3600)
        self._disable_s = settings.webhook_disable_days * _DAY_S
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End; what was being sent is sent again by another process, or by the next one."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        limits = httpx2.Limits(max_connections=_AT_ONCE, max_keepalive_connections=0)
        async with httpx2.AsyncClient(trust_env=False, follow_redirects=False, limits=limits) as client:
            while True:
                try:
                    pause = 0.0 if await self._round(client) else self._times.look_s
                except StoreUnavailable:
                    pause = self._times.outage_s
                except Exception:
                    log.exception("webhooks: a round failed")
                    pause = self._times.outage_s
                await asyncio.sleep(pause)

    async def _round(self, client: httpx2.AsyncClient) -> bool:
        """Make and send what there is; return whether there may be more."""
        if not await asyncio.to_thread(self._store.webhooks.exist):
            return False
        made = await asyncio.to_thread(self._store.webhooks.make_deliveries, _AT_ONCE)
        due = await asyncio.to_thread(self._store.webhooks.due, _AT_ONCE)
        await asyncio.gather(*(self._deliver(client, each) for each in due))
        return made + len(due) > 0

    async def _deliver(self, client: httpx2.AsyncClient, due: DueDelivery) -> None:
        delivery, sender = due.delivery, due.sender
        now = datetime.now(UTC)
        if due.is_disabled:
            outcome = _Outcome(None, "the webhook is disabled")
            over = delivery.model_copy(update={"state": "failed", "next_at": None, "error": outcome.error})
            await asyncio.to_thread(self._store.webhooks.note, sender, over, None, self._disable_s)
            return
        outcome = await self._send(client, due, now)
        noted, again_s = self._after(delivery, outcome, now)
        if await asyncio.to_thread(self._store.webhooks.note, sender, noted, again_s, self._disable_s):
            log.warning("disabled webhook %s: every delivery has failed for long; the last: %s", sender, noted.error)

    async def _send(self, client: httpx2.AsyncClient, due: DueDelivery, now: datetime) -> _Outcome:
        body = due.delivery.event.model_dump_json().encode()
        timestamp = int(now.timestamp())
        parts = urlsplit(due.url)
        try:
            async with asyncio.timeout(self._times.answer_s):
                target = await vetted(due.url, self._allowed)
                headers = {
                    "host": target.authority,
                    "content-type": "application/json",
                    "user-agent": "Trivet",
                    ID_HEADER: due.delivery.id,
                    TIME_HEADER: str(timestamp),
                    SIGNATURE_HEADER: sign(due.secret, due.delivery.id, timestamp, body),
                }
                path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                request = client.build_request("POST", target.url + path, content=body, headers=headers)
                request.extensions["sni_hostname"] = target.host
                answer = await client.send(request, stream=True)
                await answer.aclose()
        except TimeoutError:
            return _Outcome(None, f"no answer within {self._times.answer_s:g} s")
        except ForbiddenTarget as error:
            return _Outcome(None, f"{type(error).__name__}: {error}"[:500], is_forbidden=True)
        except (OSError, httpx2.HTTPError) as error:
            return _Outcome(None, f"{type(error).__name__}: {error}"[:500])
        refusal = None if answer.is_success else f"the receiver answered {answer.status_code}; a 2xx was wanted"
        return _Outcome(answer.status_code, refusal)

    def _after(
        self, delivery: WebhookDelivery, outcome: _Outcome, now: datetime
    ) -> tuple[WebhookDelivery, float | None]:
        """Return what is to be kept of a delivery, and in how many seconds it is to be sent again, if ever."""
        first = delivery.first_at or now
        attempts = delivery.attempts + 1
        noted = {"attempts": attempts, "first_at": first, "last_at": now, "status": outcome.status}
        if outcome.error is None:
            done = {"state": "delivered", "error": None, "next_at": None}
            return delivery.model_copy(update=noted | done), None
        pause = self._schedule.pause(attempts, (now - first).total_seconds(), random.random())  # noqa: S311 - jitter
        if pause is None or (outcome.is_forbidden and delivery.url is not None):  # a job's URL stays what it is
            return delivery.model_copy(
                update=noted | {"state": "failed", "error": outcome.error, "next_at": None}
            ), None
        again = datetime.fromtimestamp(now.timestamp() + pause, UTC)
        return delivery.model_copy(update=noted | {"error": outcome.error, "next_at": again}), pause
