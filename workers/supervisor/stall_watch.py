"""Notices ranks that hang, and asks them where they are."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from service.jobs.files import Folder, UnsafePathError
from workers.rank.stacks import innermost_frame, stacks_file
from workers.supervisor.rank_socket import RankSocket
from workers.supervisor.settings import SupervisorSettings
from workers.supervisor.uploader import Disk

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
        socket: RankSocket,
        folder: Path,
        stall_s: float | None,
        *,
        disk: Disk,
        publish_stacks: Callable[[int, str], None],
        settings: SupervisorSettings,
    ) -> None:
        self._socket, self._folder, self._stall_s = socket, folder, stall_s
        self._disk, self._publish_stacks, self._settings = disk, publish_stacks, settings
        self.hanging: dict[int, str] = {}
        """The innermost frame of each hanging rank."""

    async def wait_for_stall(self) -> bool:
        """Return true once the ranks hang, and ask them where. Starting ranks get longer."""
        while self._stall_s is not None:
            limit = self._stall_s if self._socket.ranks else max(self._stall_s, self._settings.first_rank_within_s)
            quiet = time.monotonic() - self._socket.heard_at
            if quiet >= limit:
                self.hanging = await self._where_ranks_are()
                return True
            await asyncio.sleep(min(limit - quiet, self._settings.stall_interval_s))
        return False

    async def _where_ranks_are(self) -> dict[int, str]:
        """Return the innermost frame of each rank; the whole stacks are published beside tracebacks."""
        self._socket.ask_for_stacks()
        await asyncio.sleep(self._settings.stacks_within_s)
        frames: dict[int, str] = {}
        for rank in self._socket.running:
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
        for pid in self._socket.forked_by(rank)[:_MOST_FORKS]:
            self._socket.ask_fork_for_stacks(rank, pid)
            text = await self._wait_for_stacks(rank, known)
            found[pid], known = text[known:], len(text)
        return found

    async def _wait_for_stacks(self, rank: int, known: int) -> str:
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
