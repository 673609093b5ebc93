"""Decides what ended a part: whatever happened first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from service.jobs.disk import full_disk
from workers.supervisor.lease import News
from workers.supervisor.outcome import Cause

logger = logging.getLogger(__name__)

Ending = Cause | Literal["lost"]


class PartEnding:
    """Takes everything that could end a part, in the part's event loop; the first decides how it ends.

    ``lease_is_over`` says whether the group is ended from elsewhere, if it has not done its work.
    """

    def __init__(self, lease_is_over: Callable[[], bool]) -> None:
        self._lease_is_over = lease_is_over
        self._first: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.fault = ""
        """The supervisor's own first error; later ones follow from it, or are worth less."""
        self.is_lost = False
        """Whether the attempt is not this supervisor's any more."""
        self.urgent = asyncio.Event()
        """Set when there is no time left to end the ranks politely."""
        self.asked = asyncio.Event()
        """Set when somebody waits for the end, whatever came first: what ranks left is waited for no longer."""

    @property
    def is_decided(self) -> bool:
        return self._first.done()

    async def first(self) -> Ending:
        """Wait for what ends the part first, and return it."""
        return await self._first

    def end(self, ending: Ending) -> None:
        """End the part, unless it is ending already."""
        if ending not in ("exited", "rank_failed"):
            self.asked.set()
        if not self._first.done():
            self._first.set_result("lease_expired" if ending == "rank_failed" and self._lease_is_over() else ending)

    def fail(self, error: BaseException, ending: Literal["fault", "disk_full"] = "fault", message: str = "") -> None:
        """End the part by an error of the supervisor's own, unless it is ending already."""
        self.fault = self.fault or message or f"{type(error).__name__}: {error}"
        self.end(ending)

    def lose(self) -> None:
        """End a part whose attempt is not this supervisor's any more."""
        self.is_lost = True
        self.urgent.set()
        self.end("lost")

    def on_news(self, news: News) -> None:
        """Take what the lease tells."""
        match news:
            case "lost":
                self.lose()
            case "lease_expired":
                self.urgent.set()
                self.end("lease_expired")
            case "stop":
                self.end("stop")

    def check(self, task: asyncio.Task[None]) -> None:
        """End the part if the task, which is done, failed."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the supervisor failed", exc_info=error)
            self.fail(error)


class DiskThread:
    """Does what touches the disk, one after the other, without holding anything else up: a disk may hang for as long
    as it likes. What fails ends the part.
    """

    def __init__(self, folder: Path, ending: PartEnding) -> None:
        self._folder, self._ending = folder, ending
        self._thread = ThreadPoolExecutor(1, "disk")

    async def run(self, act: Callable[[], None]) -> None:
        """Return when it is done, or has failed."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, act)
        except OSError as error:
            full = full_disk(error, self._folder)
            logger.warning("the disk failed: %s", error)
            self._ending.fail(error, "disk_full" if full else "fault", full or "")

    def close(self) -> None:
        """Take nothing more; what is under way is not waited for."""
        self._thread.shutdown(wait=False)
