"""HTTP to the service: where it is, the key, and answers turned into data or exceptions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from service.jobs.settings import LOOPBACK, Settings
from trivet.errors import Refused, TrivetError, Unreachable

TIMEOUT_S = 30.0
CONNECT_S = 5.0


def default_url() -> str:
    """``TRIVET_URL``, else the address that ``trivet up`` uses by its settings."""
    settings = Settings()
    return settings.url or f"http://127.0.0.1:{settings.port}"


def default_key(url: str) -> str | None:
    """``TRIVET_KEY``, else, for a service on this machine, the admin key that its first start wrote down."""
    settings = Settings()
    if settings.key is not None:
        return settings.key.get_secret_value()
    return read_key(settings.admin_key_file) if urlsplit(url).hostname in LOOPBACK else None


def key_advice(url: str) -> str:
    """Where the key for a service was looked for, and what to do where it is not the right one."""
    settings = Settings()
    if settings.key is not None:
        return "the key is that of TRIVET_KEY"
    if urlsplit(url).hostname not in LOOPBACK:
        return f"no key for {url}; set TRIVET_KEY"
    found = "the key is that in" if read_key(settings.admin_key_file) else "no key in"
    return f"{found} {settings.admin_key_file}; run it from the folder of `trivet up`, or set TRIVET_DATA or TRIVET_KEY"


def read_key(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


class Connection:
    """One service and one key. Safe to share between threads."""

    def __init__(self, url: str | None = None, key: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self.url = (url or default_url()).rstrip("/")
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise TrivetError(
                f"TRIVET_URL={self.url!r} is no address of a service; it looks like http://127.0.0.1:8437"
            )
        secret = key or default_key(self.url)
        headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
        timeout = httpx2.Timeout(timeout_s, connect=CONNECT_S)
        self._key_is_found = not key
        self._http = httpx2.Client(base_url=self.url, headers=headers, timeout=timeout)

    def close(self) -> None:
        self._http.close()

    def json(self, method: str, path: str, **options: Any) -> Any:
        """The JSON of an answer; ``None`` of an empty one. Raises :class:`Refused` and :class:`Unreachable`."""
        response = self.send(method, path, **options)
        return response.json() if response.content else None

    def send(
        self, method: str, path: str, *, params: Mapping[str, Any] | None = None, **options: Any
    ) -> httpx2.Response:
        with self._reaching():
            response = self._http.request(method, path, params=_given(params), **options)
        self._raise_for_problem(response)
        return response

    @contextmanager
    def stream(
        self, path: str, *, params: Mapping[str, Any] | None = None, **options: Any
    ) -> Iterator[httpx2.Response]:
        """A GET whose body is read piece by piece."""
        with self._reaching(), self._http.stream("GET", path, params=_given(params), **options) as response:
            if response.status_code >= 400:
                response.read()
                self._raise_for_problem(response)
            yield response

    def _raise_for_problem(self, response: httpx2.Response) -> None:
        """With what to do about the key, where that is what is wrong and the caller did not choose it."""
        try:
            raise_for_problem(response)
        except Refused as error:
            if error.status != 401 or not self._key_is_found:
                raise
            had_one = "Authorization" in self._http.headers
            advice = key_advice(self.url)
            detail = f"{error.detail}; {advice}" if had_one else advice
            raise Refused(error.status, error.title, detail) from None

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except httpx2.TransportError as error:
            raise Unreachable(self.url, str(error) or type(error).__name__) from error


def raise_for_problem(response: httpx2.Response) -> None:
    if response.status_code < 400:
        return
    try:
        body = response.json()
        raise Refused(response.status_code, body["title"], body["detail"], body.get("errors", ()))
    except (ValueError, KeyError, TypeError):
        raise Refused(response.status_code, response.reason_phrase, response.text[:500]) from None


def _given(params: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (params or {}).items() if value is not None}
