"""Calls the service over HTTP, and turns answers into data or exceptions."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import inf
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
from pydantic import BaseModel

from service.jobs.host import socket_address
from service.jobs.settings import LOOPBACK, Settings
from trivet.endpoint import Endpoint, resolve
from trivet.errors import Refused, TrivetError, Unreachable

TIMEOUT_S = 30.0
CONNECT_S = 5.0
PAGE = 1000
"""Items of one page of a list that is read as a whole."""

Record = TypeVar("Record", bound=BaseModel)


class Connection:
    """One service and one key. Safe to share between threads.

    Redirects are not followed, so the key goes nowhere else; certificates are always verified. Calls that are
    safe to repeat outlast an outage of ``outage_s`` seconds (by default the setting): see :class:`Patience`.
    """

    def __init__(
        self,
        url: str | None,
        key: str | None,
        *,
        timeout_s: float = TIMEOUT_S,
        outage_s: float | None = None,
    ) -> None:
        endpoint = resolve(url, key)
        self.patience = Patience(Settings().outage_s if outage_s is None else outage_s)
        self.url = endpoint.url.rstrip("/")
        self._advice = endpoint.advice
        self._held = ExitStack()
        headers = {} if endpoint.key is None else {"Authorization": f"Bearer {endpoint.key}"}
        timeout = httpx2.Timeout(timeout_s, connect=CONNECT_S)
        self.key_expires: str | None = None
        """When the key expires, once the service says that this is near."""
        self._http = httpx2.Client(
            headers=headers,
            timeout=timeout,
            event_hooks={"response": [self._note_answer]},
            **_transport(endpoint, self._held),
        )

    def close(self) -> None:
        self._http.close()
        self._held.close()

    def json(self, method: str, path: str, *, bears_repetition: bool = False, **options: Any) -> Any:
        """Return the JSON of an answer; ``None`` for an empty one. In an outage, reads and other safe calls are
        repeated. Raises :class:`Refused` and :class:`Unreachable`.
        """
        response = self.patience.outlast(
            lambda: self.send(method, path, **options), bears_repetition=bears_repetition or method == "GET"
        )
        try:
            return response.json() if response.content else None
        except ValueError:
            raise TrivetError(f"what answers at {self.url} is not a Trivet service: its answer is not JSON") from None

    def listed(self, kind: type[Record], path: str, **options: Any) -> list[Record]:
        """Return the records of a list that comes whole."""
        return [kind.model_validate(item) for item in self.json("GET", path, **options)["items"]]

    def items(self, path: str, params: Mapping[str, Any]) -> Iterator[Any]:
        """Yield every item of a list that comes in pages; a page is read when its first item is wanted."""
        cursor: str | None = None
        while True:
            page = self.json("GET", path, params={**params, "limit": PAGE, "cursor": cursor})
            yield from page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def send(
        self, method: str, path: str, *, params: Mapping[str, Any] | None = None, **options: Any
    ) -> httpx2.Response:
        """Send one request, once."""
        with self._reaching():
            response = self._http.request(method, path, params=_leave_out_absent(params), **options)
        self._raise_for_problem(response)
        return response

    @contextmanager
    def stream(
        self, path: str, *, params: Mapping[str, Any] | None = None, **options: Any
    ) -> Iterator[httpx2.Response]:
        """Yield the answer to a GET, sent once, whose body is read piece by piece."""
        with self._reaching(), self._http.stream("GET", path, params=_leave_out_absent(params), **options) as response:
            if response.status_code >= 300:
                response.read()
                self._raise_for_problem(response)
            yield response

    @contextmanager
    def opened(self, path: str, **options: Any) -> Iterator[httpx2.Response]:
        """Yield the answer like :meth:`stream`, and outlast an outage before it begins."""
        with ExitStack() as held:
            yield self.patience.outlast(lambda: held.enter_context(self.stream(path, **options)), bears_repetition=True)

    def _note_answer(self, response: httpx2.Response) -> None:
        self.patience.note_answer()
        self.key_expires = response.headers.get("x-trivet-key-expires", self.key_expires)

    def _raise_for_problem(self, response: httpx2.Response) -> None:
        """Raise for a refusal, with advice about the key if that is the problem and the caller did not choose it."""
        if response.is_redirect:
            target = response.headers.get("location", "")
            raise TrivetError(
                f"{self.url} redirects to {target!r}; this is not followed, because the key is for one address only: "
                "set TRIVET_URL to the service's own address"
            )
        try:
            _raise_for_problem(response)
        except Refused as error:
            if error.status != 401 or self._advice is None:
                raise
            had_one = "Authorization" in self._http.headers
            detail = f"{error.detail}; {self._advice}" if had_one else self._advice
            raise Refused(error.status, error.title, detail) from None

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except httpx2.TransportError as error:
            sent = not isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout)
            reason = str(error) or type(error).__name__
            raise Unreachable(self.url, reason, sent=sent, passes="CERTIFICATE" not in reason) from error


def _transport(endpoint: Endpoint, held: ExitStack) -> dict[str, Any]:
    """Return the options with which the HTTP client reaches the endpoint.

    A service on this machine is reached without a proxy.
    """
    parts = urlsplit(endpoint.url)
    if parts.scheme == "unix":
        try:
            address = socket_address(Path(parts.path), held)
        except OSError as error:
            raise Unreachable(endpoint.url, error.strerror or str(error)) from None
        return {"base_url": "http://localhost", "transport": httpx2.HTTPTransport(uds=address, verify=_nobody())}
    options: dict[str, Any] = {"base_url": endpoint.url, "trust_env": parts.hostname not in LOOPBACK}
    if endpoint.ca_cert is not None:
        try:
            options["verify"] = ssl.create_default_context(cafile=endpoint.ca_cert)
        except (OSError, ssl.SSLError) as error:
            raise TrivetError(f"cannot read the certificate {endpoint.ca_cert}: {error}") from None
    elif parts.scheme == "http" and not options["trust_env"]:
        options["verify"] = _nobody()
    return options


def _nobody() -> ssl.SSLContext:
    """Return a context that trusts no certificate, for connections without one: reading the system's takes as long as a
    call.
    """
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _raise_for_problem(response: httpx2.Response) -> None:
    if response.status_code < 400:
        return
    try:
        body = response.json()
        raise Refused(response.status_code, body["title"], body["detail"], body.get("errors", ()))
    except (ValueError, KeyError, TypeError):
        raise Refused(response.status_code, response.reason_phrase, response.text[:500]) from None


def _leave_out_absent(params: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (params or {}).items() if value is not None}


Answer = TypeVar("Answer")
_STATUSES = (502, 503, 504)
"""Statuses that the service, or a proxy in front of it, answers in an outage."""
_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)
_MOST_RESTARTS = 10
"""How often the time of an outage begins again with a call that was answered, and broke off."""
_ARRIVAL_S = 2.0
"""How long to wait for a service that never answered: probably there is none."""


class Patience:
    """Outlasts outages of one service of at most ``outage_s`` seconds. Safe to share between threads."""

    def __init__(
        self,
        outage_s: float,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.outage_s = outage_s
        self._sleep = sleep
        self._clock = clock
        self._answered = -inf

    def outlast(self, call: Callable[[], Answer], *, bears_repetition: bool) -> Answer:
        """Return the call's answer, calling again in an outage. A call that is not safe to repeat is repeated
        only if it never reached the service. If the outage lasts, raises the last error with the time spent.
        """
        began, tries = self._clock(), 0
        while True:
            asked = self._clock()
            try:
                answer = call()
            except (Unreachable, Refused) as error:
                if isinstance(error, Refused):
                    self.note_answer()
                elif self._answered >= asked and tries < _MOST_RESTARTS:
                    began = self._clock()  # a download may have gone well for hours
                if not _is_outage(error) or not (bears_repetition or _was_not_sent(error)):
                    raise
                pause = _PAUSES_S[min(tries, len(_PAUSES_S) - 1)]
                passed = self._clock() - began
                if passed + pause > self.limit_s:
                    raise (error.after(passed) if tries else error) from error.__cause__
                self._sleep(pause)
                tries += 1
            else:
                self.note_answer()
                return answer

    def note_answer(self) -> None:
        """Note that the service is there: an outage is waited for from now on, and not whether there is a service."""
        self._answered = self._clock()

    @property
    def limit_s(self) -> float:
        """Return how long to wait in an outage now, in seconds."""
        return self.outage_s if self._answered > -inf else min(self.outage_s, _ARRIVAL_S)


def _is_outage(error: Unreachable | Refused) -> bool:
    return error.passes if isinstance(error, Unreachable) else error.status in _STATUSES


def _was_not_sent(error: Unreachable | Refused) -> bool:
    return isinstance(error, Unreachable) and not error.sent


def lines_of(response: httpx2.Response) -> Iterator[str]:
    """Yield the lines of a text; only a line feed ends a line."""
    held = ""
    for chunk in response.iter_text():
        *complete, held = (held + chunk).split("\n")
        yield from complete
    if held:
        yield held
