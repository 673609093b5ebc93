"""Notices that the ranks of a part hang, and finds out where."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from service.jobs.safe_files import Folder, UnsafePathError
from workers.rank.stacks import innermost_frame, stacks_file
from workers.supervisor.relay import Relay
from workers.supervisor.settings import SupervisorSettings
from workers.supervisor.uploader import Disk

_LONGEST_STACKS = 1 << 20


class StallWatch:
    """Watches for ``stall_s`` seconds in which no rank reports or prints anything; for no limit where that is None."""

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
        """Return true once the ranks hang, and ask them where. Ranks that are still starting get longer."""
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
            if stacks:
                self._publish_stacks(rank, stacks)
            frames[rank] = innermost_frame(stacks)
        return frames

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
