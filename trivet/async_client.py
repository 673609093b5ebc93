"""Provides the client for programs with an event loop: every call of :class:`trivet.Client`, without blocking."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from trivet.client import Client

P = ParamSpec("P")
R = TypeVar("R")
_AT_ONCE = 64
"""Most calls at a time; further ones wait for their turn."""
_END = object()


def _twin(method: Callable[Concatenate[Client, P], R]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]]:
    """Return a coroutine that runs a method of the client in a thread."""

    @wraps(method)
    async def twin(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.in_thread(partial(method, self.client, *args, **kwargs))

    return twin


def _stream(
    method: Callable[Concatenate[Client, P], Iterator[R]],
) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[R]]:
    """Return an asynchronous iterator over the items that a method of the client yields."""

    @wraps(method)
    async def twin(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[R]:
        items = await self.in_thread(partial(method, self.client, *args, **kwargs))
        try:
            while (item := await self.in_thread(partial(next, items, _END))) is not _END:
                yield item
        finally:
            with suppress(ValueError):  # a thread still waits for the next item: it ends with the client
                getattr(items, "close", lambda: None)()

    return twin


class AsyncClient:
    """Makes the calls of :class:`trivet.Client` for coroutines; arguments, answers and errors are the same.

    ``client`` is the underlying client, for calls without a twin here.
    """

    def __init__(self, url: str | None = None, key: str | None = None) -> None:
        self.client = Client(url, key)
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="trivet")

    async def in_thread(self, call: Callable[[], R]) -> R:
        """Run a blocking call without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def close(self) -> None:
        """Close the client's connections; calls that still wait end with an error."""
        self.client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    check = _twin(Client.check)
    submit = _twin(Client.submit)
    submit_many = _twin(Client.submit_many)
    job = _twin(Client.job)
    job_page = _twin(Client.job_page)
    wait = _twin(Client.wait)
    cancel = _twin(Client.cancel)
    retry = _twin(Client.retry)
    delete = _twin(Client.delete)
    delete_matching = _twin(Client.delete_matching)
    metrics = _twin(Client.metrics)
    report = _twin(Client.report)
    notices = _twin(Client.notices)
    artifacts = _twin(Client.artifacts)
    download = _twin(Client.download)
    upload = _twin(Client.upload)
    verify = _twin(Client.verify)
    compile_check = _twin(Client.compile_check)
    follow = _stream(Client.follow)
    follow_all = _stream(Client.follow_all)
    logs = _stream(Client.logs)
    bounds = _stream(Client.bounds)
    jobs = _stream(Client.jobs)
