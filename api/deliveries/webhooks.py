"""Sends webhooks from an API process. Every process may do it: the broker gives each delivery to one of them at a
time.
"""

from __future__ import annotations

import asyncio
import logging
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from html import escape
from urllib.parse import urlsplit

import httpx2
import orjson

from api.deliveries.addresses import ForbiddenTarget, vetted
from api.deliveries.mail import send_mail
from api.deliveries.rounds import FAILURES, DeliveryRounds, RoundTimes
from service.jobs.records.messages import message_of
from service.jobs.records.webhooks import ID_HEADER, SIGNATURE_HEADER, TIME_HEADER, WebhookDelivery, sign
from service.jobs.settings import Settings
from service.jobs.store import Store
from service.jobs.store.webhooks import DueDelivery

_AT_ONCE, _OF_SLOW = 64, 16
"""Most deliveries at once, of all and to one slow receiver."""
_MOST_SLOW = 1000
"""Slow receivers that are known at once."""
_DAY_S = 86_400.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SenderTimes(RoundTimes):
    """Times of a sender, in seconds."""

    answer_s: float = 10.0
    """Limit on a receiver's whole answer."""
    slow_s: float = 2.0
    """A receiver that last took longer is slow: others do not wait for it."""
    put_back_s: float = 1.0
    """Pause of deliveries to a slow receiver that already gets some."""


@dataclass(frozen=True)
class _SendOutcome:
    """The status that came back, if any, and why it is a failure, if it is one."""

    status: int | None
    error: str | None
    is_forbidden: bool = False
    """Whether the URL leads to a forbidden address."""


def _failed(error: Exception) -> _SendOutcome:
    told = f"{type(error).__name__}: {error}"[:500]
    return _SendOutcome(None, told, is_forbidden=isinstance(error, ForbiddenTarget))


class WebhookSender(DeliveryRounds[SenderTimes]):
    """Sends webhooks in rounds."""

    def __init__(self, settings: Settings, store: Store, times: SenderTimes = SenderTimes()) -> None:
        super().__init__(settings, store, times, retry_hours=settings.webhook_retry_hours)
        self._disable_s = settings.webhook_disable_days * _DAY_S
        self._mailing = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="mail")
        """A mail server that does not answer keeps these threads, and not those of the event loop."""
        self._slow: set[str] = set()
        """Receivers that were slow to answer last."""
        self._under_way: dict[asyncio.Task[None], str] = {}
        """Deliveries that are being sent, with their receivers."""

    async def stop(self) -> None:
        await super().stop()
        self._mailing.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        limits = httpx2.Limits(max_connections=_AT_ONCE, max_keepalive_connections=0)
        async with httpx2.AsyncClient(
            trust_env=False, follow_redirects=False, limits=limits, timeout=self._times.answer_s
        ) as self._client:
            try:
                await super()._run()
            finally:
                for task in self._under_way:
                    task.cancel()
                await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _round(self) -> bool:
        """Begin as many as there is room for; one receiver that does not answer keeps no other waiting."""
        if len(self._under_way) >= _AT_ONCE:
            await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
        if not await asyncio.to_thread(self._store.webhooks.exist):
            return False
        made = await asyncio.to_thread(self._store.webhooks.make_deliveries, _AT_ONCE)
        due = await asyncio.to_thread(self._store.webhooks.due, _AT_ONCE - len(self._under_way))
        later = [each for each in due if not self._begin(each)]
        if later:
            await asyncio.to_thread(self._store.webhooks.put_back, later, self._times.put_back_s)
        return made + len(due) > len(later)

    def _begin(self, due: DueDelivery) -> bool:
        """Begin to send a delivery; return whether its receiver may have it now."""
        receiver = urlsplit(due.url).netloc or due.format
        if receiver in self._slow and list(self._under_way.values()).count(receiver) >= _OF_SLOW:
            return False
        task = asyncio.create_task(self._deliver(due))
        self._under_way[task] = receiver
        task.add_done_callback(partial(self._ended, asyncio.get_running_loop().time()))
        return True

    def _ended(self, began: float, task: asyncio.Task[None]) -> None:
        receiver = self._under_way.pop(task)
        self._slow.discard(receiver)
        if task.get_loop().time() - began > self._times.slow_s:
            if len(self._slow) >= _MOST_SLOW:
                self._slow.clear()  # specs name any receivers
            self._slow.add(receiver)
        if not task.cancelled() and (error := task.exception()) is not None:  # it is due again after its hold
            log.warning("a delivery was not noted: %s: %s", type(error).__name__, error)

    async def _deliver(self, due: DueDelivery) -> None:
        delivery, sender = due.delivery, due.sender
        now = datetime.now(UTC)
        if due.is_disabled:
            outcome = _SendOutcome(None, "the webhook is disabled")
            over = delivery.model_copy(update={"state": "failed", "next_at": None, "error": outcome.error})
            await asyncio.to_thread(self._store.webhooks.note, sender, over, None, self._disable_s)
            return
        outcome = await self._send(due, now)
        noted, again_s = self._after(delivery, outcome, now)
        if await asyncio.to_thread(self._store.webhooks.note, sender, noted, again_s, self._disable_s):
            log.warning(
                "disabled webhook %s: every delivery has failed for a long time; the last: %s", sender, noted.error
            )

    async def _send(self, due: DueDelivery, now: datetime) -> _SendOutcome:
        body, timestamp, parts = _body(due), int(now.timestamp()), urlsplit(due.url)
        if due.format == "email":
            return await asyncio.get_running_loop().run_in_executor(self._mailing, self._mail, due, now)
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
                request = self._client.build_request("POST", target.url + path, content=body, headers=headers)
                request.extensions["sni_hostname"] = target.host
                answer = await self._client.send(request, stream=True)
                await answer.aclose()
        except TimeoutError:
            return _SendOutcome(None, f"no answer within {self._times.answer_s:g} s")
        except FAILURES as error:
            return _failed(error)
        refusal = None if answer.is_success else f"the receiver answered {answer.status_code}; expected a 2xx"
        return _SendOutcome(answer.status_code, refusal)

    def _mail(self, due: DueDelivery, now: datetime) -> _SendOutcome:
        try:
            send_mail(self._settings, due.url, due.delivery, now, self._times.answer_s)
        except FAILURES as error:
            return _failed(error)
        return _SendOutcome(None, None)

    def _after(
        self, delivery: WebhookDelivery, outcome: _SendOutcome, now: datetime
    ) -> tuple[WebhookDelivery, float | None]:
        """Return the record to keep of a delivery, and the seconds until it is sent again, if ever."""
        first = delivery.first_at or now
        attempts = delivery.attempts + 1
        noted = {"attempts": attempts, "first_at": first, "last_at": now, "status": outcome.status}
        if outcome.error is None:
            done = {"state": "delivered", "error": None, "next_at": None}
            return delivery.model_copy(update=noted | done), None
        pause = self._schedule.pause(attempts, (now - first).total_seconds(), random.random())  # noqa: S311 - jitter
        if pause is None or (outcome.is_forbidden and delivery.url is not None):  # a job's URL never changes
            return delivery.model_copy(
                update=noted | {"state": "failed", "error": outcome.error, "next_at": None}
            ), None
        again = datetime.fromtimestamp(now.timestamp() + pause, UTC)
        return delivery.model_copy(update=noted | {"error": outcome.error, "next_at": again}), pause


def _body(due: DueDelivery) -> bytes:
    """Return the body of a request: the event, or for chats a text in which nothing is a link or a mention."""
    if due.format != "slack":
        return due.delivery.event.model_dump_json().encode()
    message = message_of(due.delivery.event)
    return orjson.dumps({"text": escape(f"{message.subject}\n{message.text}", quote=False)})
