"""Decides which cause ended a part, the first one, and notices ranks that hang."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from service.jobs.files import Folder, UnsafePathError, full_disk
from workers.rank.stacks import innermost_frame, stacks_file
from workers.supervisor.lease import News
from workers.supervisor.outcome import Cause
from workers.supervisor.relay import Relay
from workers.supervisor.settings import SupervisorSettings
from workers.supervisor.uploader import Disk

logger = logging.getLogger(__name__)

Ending = Cause | Literal["lost"]


class PartEnding:
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

    def __init__(self, folder: Path, ending: PartEnding) -> None:
        self._folder, self._ending = folder, ending
        self._thread = ThreadPoolExecutor(1, "disk")

    async def run(self, act: Callable[[], None]) -> None:
        """Return when the work is done or has failed."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, act)
        except OSError as error:
            full = full_disk(error, self._folder)
            logger.warning("the disk failed: %s", error)
            self._ending.fail(error, "disk_full" if full else "fault", full or "")

    def close(self) -> None:
        """Take no more work; calls under way are not awaited."""
        self._thread.shutdown(wait=False)


_LONGEST_STACKS = 1 << 20


_MOST_FORKS = 16
_MOMENT_S = 0.05


def _place(stacks: str, forks: Iterable[str]) -> str:
    """Return the line at which a rank is, and those of its forks."""
    places = dict.fromkeys(innermost_frame(each) for each in forks)
    return innermost_frame(stacks) + (f" (its processes at {', '.join(places)})" if places else "")


class StallWatch:
    """Watches for ``stall_s`` seconds in which no rank reports or prints anything; ``None`` means no limit."""

    def __init__(
        self,
        relay: Relay,
        folder: Path,
        stall_s: float | None,
        *,
        disk: Disk,
        publish_stacks: Callable[[int, str], None],
        settings: SupervisorSettings,
    ) -> None:
        self._relay, self._folder, self._stall_s = relay, folder, stall_s
        self._disk, self._publish_stacks, self._settings = disk, publish_stacks, settings
        self.hanging: dict[int, str] = {}
        """The innermost frame of each hanging rank."""

    async def stalled(self) -> bool:
        """Return true once the ranks hang, and ask them where. Starting ranks get longer."""
        while self._stall_s is not None:
            limit = self._stall_s if self._relay.ranks else max(self._stall_s, self._settings.first_rank_within_s)
            quiet = time.monotonic() - self._relay.heard_at
            if quiet >= limit:
                self.hanging = await self._where_ranks_are()
                return True
            await asyncio.sleep(min(limit - quiet, self._settings.stall_interval_s))
        return False

    async def _where_ranks_are(self) -> dict[int, str]:
        """Return the innermost frame of each rank; the whole stacks are published beside tracebacks."""
        self._relay.ask_for_stacks()
        await asyncio.sleep(self._settings.stacks_within_s)
        frames: dict[int, str] = {}
        for rank in self._relay.running:
            stacks = await self._stacks(rank)
            forks = await self._of_forks(rank, stacks)
            if stacks:
                named = (f"\nProcess {pid}, which this rank has forked:\n{own}" for pid, own in forks.items())
                self._publish_stacks(rank, "".join((stacks, *named)))
            frames[rank] = _place(stacks, forks.values())
        return frames

    async def _of_forks(self, rank: int, stacks: str) -> dict[int, str]:
        """Return the stacks of the processes that a rank has forked, which write them one by one into the same file."""
        found: dict[int, str] = {}
        known = len(stacks)
        for pid in self._relay.forked_by(rank)[:_MOST_FORKS]:
            self._relay.ask_fork_for_stacks(rank, pid)
            text = await self._grown(rank, known)
            found[pid], known = text[known:], len(text)
        return found

    async def _grown(self, rank: int, known: int) -> str:
        """Return the stacks of a rank's file once there are more than before, and no more come for a moment."""
        until = time.monotonic() + self._settings.stacks_within_s
        text = ""
        while time.monotonic() < until:
            await asyncio.sleep(_MOMENT_S)
            before, text = text, await self._stacks(rank)
            if len(text) > known and text == before:
                break
        return text

    async def _stacks(self, rank: int) -> str:
        """Return the stacks that a rank wrote on request; empty if it could not."""
        texts: list[str] = []

        def read() -> None:
            with (
                contextlib.suppress(FileNotFoundError, UnsafePathError),
                Folder.open(self._folder) as folder,
                folder.reader(stacks_file(self._folder, rank).name) as file,
            ):
                texts.append(file.read(_LONGEST_STACKS).decode(errors="replace"))

        await self._disk(read)
        return texts[0] if texts else ""
