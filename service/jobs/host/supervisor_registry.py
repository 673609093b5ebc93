"""Records the attempts that are supervised on this host, one file each, so that a restarted worker finds running
ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from service.jobs.files import atomic_write, remove_tree, set_aside
from service.jobs.host.processes import Process, born_with, end_tree, send_to_each
from service.jobs.records import AttemptRef
from service.linux import uptime

_REPORTS_WITHIN_S = 1200.0
"""Seconds that a supervisor has for its report, and to tidy and end after it, before it may be killed."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SupervisedAttempt:
    """A supervised attempt. It counts as live until the keeper, which ends last, has ended too, and nothing that one of
    its ranks started is left: where both were killed, a compiler may live on.
    """

    name: str
    """``job:attempt``"""
    supervisor: Process
    keeper: Process
    scratch: str
    reports_since: float | None = None
    """The time (:func:`service.linux.uptime`) when nothing of the part was left but to report its end and to tidy."""

    @property
    def ends_by_itself(self) -> bool:
        since = self.reports_since
        return since is not None and self.supervisor.alive and uptime() - since < _REPORTS_WITHIN_S

    @property
    def alive(self) -> bool:
        return self.supervisor.alive or self.keeper.alive

    def end_orphans(self) -> bool:
        """Kill the rest of an attempt's group without supervisor and keeper; return whether there was any."""
        job, _, attempt = self.name.partition(":")
        orphans = born_with({"TRIVET_JOB": job, "TRIVET_ATTEMPT": attempt})
        send_to_each(orphans, signal.SIGKILL)
        return bool(orphans)


class SupervisorRegistry:
    """Keeps the entries of one host: ``folder/{job}.{attempt}.json``, each a :class:`SupervisedAttempt`. ``trivet up``
    reads them too, to end what it started.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._heartbeat = folder, folder / "heartbeat"

    @contextmanager
    def entered(self, ref: AttemptRef, keeper_pid: int, scratch: Path) -> Iterator[bool]:
        """Register the calling process as the supervisor of ``ref`` while the block runs. Yield False if a live
        one is registered already: a repeated launch, whose claim would be refused.
        """
        me, keeper = Process.of(os.getpid()), Process.of(keeper_pid)
        path = self._path(ref.job_id, ref.attempt)
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            known, entry = _read(path), None
            if me is not None and keeper is not None and not (known and known.alive):
                entry = SupervisedAttempt(f"{ref.job_id}:{ref.attempt}", me, keeper, str(scratch))
                _write(path, entry)
        try:
            yield entry is not None
        finally:
            if entry is not None:
                self._remove(path, entry)

    def note_report(self, ref: AttemptRef) -> None:
        """Note that the calling supervisor begins to report the end of its part. From then on :meth:`kill` spares it,
        unless it hangs: with its report, the part is no longer current.
        """
        path = self._path(ref.job_id, ref.attempt)
        with contextlib.suppress(OSError), self._locked():
            entry = _read(path)
            if entry is not None and entry.supervisor == Process.of(os.getpid()):
                _write(path, replace(entry, reports_since=uptime()))

    def live(self) -> tuple[str, ...]:
        """Return names of the attempts that still have processes; clear away the leftovers of dead supervisors."""
        names = []
        for path, entry in self._entries():
            if entry.alive or entry.end_orphans():
                names.append(entry.name)
            else:
                remove_tree(Path(entry.scratch))
                self._remove(path, entry)
        return tuple(names)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock under which entries are read and changed."""
        with (self._folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _remove(self, path: Path, entry: SupervisedAttempt) -> None:
        """Remove an entry, unless another supervisor's took its place."""
        with contextlib.suppress(FileNotFoundError), self._locked():
            known = _read(path)
            if known is not None and known.supervisor == entry.supervisor:
                path.unlink()

    def note_heartbeat(self) -> None:
        """Touch the file ``heartbeat``, whose age shows those who watch this host that its worker reports."""
        self._heartbeat.touch()

    def stop_all(self, launched: Iterable[int], grace_s: float, report_within_s: float) -> None:
        """Ask every supervisor of this host to end its group and give its part back to the queue; kill those
        that have not done so ``report_within_s`` after the ranks' ``grace_s``.

        ``launched`` are processes that may have a part to run and have not registered yet.
        """
        entered = [entry.supervisor.pid for _, entry in self._entries() if entry.supervisor.alive]
        processes = list({*_running(entered), *_running(launched)})
        send_to_each(processes, signal.SIGINT)
        _, alive = psutil.wait_procs(processes, timeout=grace_s + report_within_s)
        send_to_each(alive, signal.SIGKILL)  # their keepers end the groups
        psutil.wait_procs(alive, timeout=report_within_s)

    def kill(self, ref: AttemptRef) -> None:
        """End the supervisor of a part that is no longer current, at once unless it reports its end; its keeper ends
        the group. A keeper that still lives at the next call cannot do that, for example because it is stopped: then
        this ends the group, and the keeper last, so that no process escapes.
        """
        entry = _read(self._path(ref.job_id, ref.attempt))
        if entry is None or entry.ends_by_itself:
            return
        logger.warning("ending %s, which is no longer current", ref)
        if entry.supervisor.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(entry.supervisor.pid, signal.SIGKILL)
        elif entry.keeper.alive:
            end_tree(entry.keeper.pid)

    def _entries(self) -> Iterator[tuple[Path, SupervisedAttempt]]:
        for path in sorted(self._folder.glob("*.json")):
            if (entry := _read(path)) is not None:
                yield path, entry

    def _path(self, job_id: str, attempt: int) -> Path:
        return self._folder / f"{job_id}.{attempt}.json"


def _running(pids: Iterable[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def _write(path: Path, entry: SupervisedAttempt) -> None:
    atomic_write(path, json.dumps(asdict(entry)).encode())


def _read(path: Path) -> SupervisedAttempt | None:
    """Return the entry, or None when it is gone or torn. A loss of power can tear a file, but no process outlives
    one, so an entry that cannot be read has nothing left to supervise: it is set aside.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        fields = json.loads(text)
        supervisor, keeper = Process(**fields["supervisor"]), Process(**fields["keeper"])
        return SupervisedAttempt(fields["name"], supervisor, keeper, fields["scratch"], fields.get("reports_since"))
    except (ValueError, KeyError, TypeError):
        logger.warning("set aside %s, which is not a supervisor's entry: %.80r", set_aside(path), text)
        return None
