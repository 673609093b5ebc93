"""Which attempts are supervised on this host: a file each, so that a restarted worker finds what still runs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from service.jobs.records import AttemptRef


@dataclass(frozen=True)
class Process:
    """A process by pid and start time, so that a reused pid is not mistaken for it."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The live process with this pid, if any; a zombie is not alive."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] in "ZX" else cls(pid, fields[19])

    @property
    def alive(self) -> bool:
        return Process.of(self.pid) == self


@dataclass(frozen=True)
class Entry:
    """A supervised attempt. It counts as live until the keeper, which ends last, has ended too."""

    name: str
    """``job:attempt``"""
    supervisor: Process
    keeper: Process
    scratch: str

    @property
    def alive(self) -> bool:
        return self.supervisor.alive or self.keeper.alive


class Roster:
    """The entries of one host: ``folder/{job}.{attempt}.json``, each an :class:`Entry`. ``trivet up`` reads them too,
    to end what it started.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def entered(self, ref: AttemptRef, keeper_pid: int, scratch: Path) -> Iterator[bool]:
        """Enter the calling process as the supervisor of ``ref`` while the block runs. False when a live one is
        entered already: a repeated launch, whose claim would be refused.
        """
        me, keeper = Process.of(os.getpid()), Process.of(keeper_pid)
        path = self._path(ref.job_id, ref.attempt)
        if me is None or keeper is None or ((known := _read(path)) and known.alive):
            yield False
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{me.pid}.part")
        draft.write_text(json.dumps(asdict(Entry(f"{ref.job_id}:{ref.attempt}", me, keeper, str(scratch)))))
        draft.replace(path)
        try:
            yield True
        finally:
            path.unlink(missing_ok=True)

    def live(self) -> tuple[str, ...]:
        """Names of the attempts that still have processes; what dead supervisors left behind is cleared away."""
        names = []
        for path in sorted(self._folder.glob("*.json")):
            entry = _read(path)
            if entry is not None and entry.alive:
                names.append(entry.name)
            elif entry is not None:
                shutil.rmtree(entry.scratch, ignore_errors=True)
                path.unlink(missing_ok=True)
        return tuple(names)

    def kill(self, ref: AttemptRef) -> None:
        """End a supervisor at once; its keeper ends the group."""
        entry = _read(self._path(ref.job_id, ref.attempt))
        if entry is not None and entry.supervisor.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(entry.supervisor.pid, signal.SIGKILL)

    def _path(self, job_id: str, attempt: int) -> Path:
        return self._folder / f"{job_id}.{attempt}.json"


def _read(path: Path) -> Entry | None:
    try:
        fields = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return Entry(fields["name"], Process(**fields["supervisor"]), Process(**fields["keeper"]), fields["scratch"])
