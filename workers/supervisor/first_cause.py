"""Holds the first of all causes that could end a part; from it and other evidence ``outcome`` judges how it ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from service.jobs.files import full_disk
from workers.supervisor.lease import News
from workers.supervisor.outcome import Cause

logger = logging.getLogger(__name__)

Ending = Cause | Literal["lost"]


class FirstCause:
    """Collects everything that could end a part, in the part's event loop; the first cause decides how it ends.

    ``lease_is_over`` says whether others end the group, if it has not done its work.
    """

    def __init__(self, lease_is_over: Callable[[], bool]) -> None:
        self._lease_is_over = lease_is_over
        self._first: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.fault = ""
        """The supervisor's own first error; later ones follow from it, or matter less."""
        self.is_lost = False
        """Whether this supervisor has lost the attempt."""
        self.urgent = asyncio.Event()
        """Set when there is no time left to end the ranks politely."""
        self.asked = asyncio.Event()
        """Set when somebody waits for the end, whatever its cause; then the ranks' last events are not awaited."""

    @property
    def is_decided(self) -> bool:
        return self._first.done()

    async def first(self) -> Ending:
        """Wait for the first cause, and return it."""
        return await self._first

    def end(self, ending: Ending) -> None:
        """End the part, unless it is ending already."""
        if ending not in ("exited", "rank_failed"):
            self.asked.set()
        if not self._first.done():
            self._first.set_result("lease_expired" if ending == "rank_failed" and self._lease_is_over() else ending)

    def fail(self, error: BaseException, ending: Literal["fault", "disk_full"] = "fault", message: str = "") -> None:
        """Fail the part by an error of the supervisor's own, unless it is ending already."""
        self.fault = self.fault or message or f"{type(error).__name__}: {error}"
        self.end(ending)

    def lose(self) -> None:
        """End a part whose attempt this supervisor has lost."""
        self.is_lost = True
        self.urgent.set()
        self.end("lost")

    def on_news(self, news: News) -> None:
        """Take a directive from the lease."""
        match news:
            case "lost":
                self.lose()
            case "lease_expired":
                self.urgent.set()
                self.end("lease_expired")
            case "stop":
                self.end("stop")

    def check(self, task: asyncio.Task[None]) -> None:
        """End the part if this finished task failed."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the supervisor failed", exc_info=error)
            self.fail(error)


class DiskThread:
    """Runs disk work in order without blocking anything else, since a disk may hang for any time. A failure
    ends the part.
    """

    def __init__(self, folder: Path, cause: FirstCause) -> None:
        self._folder, self._cause = folder, cause
        self._thread = ThreadPoolExecutor(1, "disk")

    async def run(self, act: Callable[[], None]) -> None:
        """Return when the work is done or has failed."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, act)
        except OSError as error:
            full = full_disk(error, self._folder)
            logger.warning("the disk failed: %s", error)
            self._cause.fail(error, "disk_full" if full else "fault", full or "")

    def close(self) -> None:
        """Take no more work; calls under way are not awaited."""
        self._thread.shutdown(wait=False)
