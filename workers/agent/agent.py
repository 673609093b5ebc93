"""Runs the worker of a host: reports it, hands out work for the fleet, and starts supervisors for what is placed
here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from kombu.exceptions import OperationalError

from service.jobs.files import atomic_write, trim
from service.jobs.host import (
    ENV_PREFIX,
    NotPrivateError,
    SupervisorRegistry,
    close_to_others,
    config_file,
    overcommitment,
)
from service.jobs.monitoring.numbers import Meter
from service.jobs.records import AttemptRef
from service.jobs.runtime import Stopwatch
from service.jobs.settings import Settings
from service.jobs.spec.common import JOB_ID
from service.jobs.store import BrokerRefused, HostReport, Store, StoreUnavailable
from service.jobs.text import log_fields, log_to_stderr
from service.jobs.tracing import Attributes, tracing_for
from service.torch_internals.installed import installed_torch
from workers.agent.admission import CannotWork, address_of, check_admitted, sign_off, usable_devices
from workers.agent.celery_app import Dispatcher, create_app, serve
from workers.agent.launching import LauncherDesk, service_of
from workers.agent.supervisors import SUPERVISOR, Supervisors
from workers.inventory import cpu_slots, cuda_devices, threads_by_pool, versions
from workers.launcher.confinement import available
from workers.launchers import LauncherContext, launcher_class
from workers.supervisor.attempt_folder import compiled_caches
from workers.supervisor.group import remove_leftovers
from workers.supervisor.job_policy import JobPolicy
from workers.supervisor.program import HOST_NAMESPACES
from workers.supervisor.settings import SupervisorOrder

_REPEAT_S = 60.0

logger = logging.getLogger(__name__)
_NOT_SHARED = frozenset(
    f"{ENV_PREFIX}{name}"
    for name in ("WORKER_NAME", "WORKER_ADDRESS", "CPU_SLOTS", "LAUNCHERS", "KEY", "URL", "STOP_JOBS")
)
"""Settings of this worker that hosts of allocations do not get."""


class Outage:
    """Says once that the broker is away, and once that it is back, however many threads notice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began: float | None = None
        self._said = 0.0

    def note(self, error: Exception) -> None:
        """Log the error, unless the outage that it belongs to was logged in the last minute."""
        with self._lock:
            now = time.monotonic()
            if self._began is None:
                self._began, self._said = now, now
                logger.warning("waiting for the broker, which does not answer: %s", error)
            elif now - self._said >= _REPEAT_S:
                self._said = now
                logger.warning("the broker has been away for %.0f s: %s", now - self._began, error)

    def over(self) -> None:
        """Log that the broker answers again, if it had not."""
        with self._lock:
            if self._began is not None:
                logger.info("the broker is back after %.1f s", time.monotonic() - self._began)
                self._began = None


_DAY_S = 86_400.0


@dataclass(frozen=True)
class AgentSettings:
    """Tunes how often an agent does its chores, in seconds. With n workers, pauses marked "n times" are n times as
    long.
    """

    dispatch_s: float = 0.025
    """The least seconds between two looks for work, n times."""
    look_s: float = 0.6
    """The most seconds between two looks for work when no news comes, n times. The store's clock needs some call each
    second."""
    reap_s: float = 1.0
    """Seconds between two looks for leases that ended, n times."""
    expire_s: float = 600.0
    """Seconds between two searches for data to delete, n times."""
    launch_s: float = 1.0
    """Seconds between two comparisons of each served launcher's resources with the jobs' demands."""
    outage_s: float = 0.5
    """Seconds after a chore that failed, for example while the broker is away."""
    report_within_s: float = 10.0
    """Seconds for a stopped supervisor to report its attempt's end, beyond the grace of its ranks."""
    beats_per_life: int = 5
    """Heartbeats in the time after which a silent host gets no work: four may be lost."""
    restart_after_s: float = 5.0
    """Seconds until another fork server is started after one that failed."""


def _supervisor_command(policy: JobPolicy, command: Sequence[str] = SUPERVISOR) -> tuple[str, ...]:
    """Return the command that starts a supervisor under this policy."""
    return (*command, HOST_NAMESPACES) if policy.isolation == "none" else tuple(command)


def _host_report(settings: Settings, policy: JobPolicy, address: str) -> HostReport:
    """Return what this host tells the service of itself, but for what changes from beat to beat."""
    cuda = usable_devices(installed_torch(), cuda_devices({}), cuda_devices(os.environ))
    slots = cpu_slots(settings.cpu_slots)
    return HostReport(
        name=settings.worker_name,
        address=address,
        cuda=cuda,
        cpu_slots=slots,
        threads=threads_by_pool({"cuda": len(cuda), "cpu": slots}, os.environ),
        versions=versions(),
        isolation=("limits",) if policy.isolation == "none" else available(),
    )


def open_desks(settings: Settings, store: Store) -> list[LauncherDesk]:
    """Return a desk for each launcher that this worker's settings name. Raises ``ValueError`` for an unknown launcher.

    The settings for hosts of allocations are written to the data folder, for this user alone: they may hold the
    broker's password, which must reach no command line and no scheduler.
    """
    desks = []
    for name in filter(None, settings.launchers.split(",")):
        folder = settings.layout.launcher(name)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        shared = {
            key: value for key, value in os.environ.items() if key.startswith(ENV_PREFIX) and key not in _NOT_SHARED
        }
        if (file := config_file()) is not None:
            shared[f"{ENV_PREFIX}CONFIG"] = str(file.resolve())
        shared |= {f"{ENV_PREFIX}DATA": str(settings.layout.root), f"{ENV_PREFIX}WARM_SUPERVISORS": "0"}
        atomic_write(folder / "settings.json", json.dumps(shared).encode())
        context = LauncherContext(
            service=service_of(settings.layout),
            folder=folder,
            options=getattr(settings, f"{name}_options", ""),
            stop_grace_s=settings.stop_grace_s,
        )
        launcher, supervisor = launcher_class(name)(context), _supervisor_command(JobPolicy.of(settings))
        desks.append(LauncherDesk(name, launcher, store, settings.worker_name, folder=folder, supervisor=supervisor))
    return desks


class Agent:
    """One per host. Any agent places, dispatches and reaps for the whole fleet, so none is indispensable."""

    def __init__(self, settings: Settings, chores: AgentSettings, supervisor: Sequence[str] = SUPERVISOR) -> None:
        self._settings, self._chores = settings, chores
        self._limits = settings.store_limits
        self._host = settings.worker_name
        self._address = address_of(settings, settings.broker_url)
        self._store = Store.connect(settings.broker_url, settings.layout, self._limits)
        self._app = create_app(settings.broker_url)
        self._dispatcher = Dispatcher(self._app)
        folder = settings.layout.host(self._host)
        self._registry = SupervisorRegistry(folder)
        self._policy = JobPolicy.of(settings)
        self._supervisors = Supervisors(
            _supervisor_command(self._policy, supervisor),
            folder / "supervisors.log",
            forks=settings.warm_supervisors > 0,
            restart_after_s=chores.restart_after_s,
            idle_s=settings.warm_idle_s,
        )
        self._report = _host_report(settings, self._policy, self._address)
        self._desks = open_desks(settings, self._store)
        self._stop = threading.Event()
        self._meter, self._tracing = Meter(), tracing_for("agent", os.environ)
        self._outage = Outage()
        self._fleet = 1

    def run(self) -> None:
        """Work until SIGTERM or SIGINT, in the main thread. Supervisors at work are left alone, unless the settings say
        that a worker stops its jobs.
        """
        threads = [
            threading.Thread(target=self._repeat, args=(work, pause), name=name, daemon=True)
            for name, work, pause in self._list_chores()
        ]
        logger.info("%s", self._describe_host())
        for thread in threads:
            thread.start()
        try:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until Celery has a handler of its own
            serve(self._app, self._host, self.launch)
        finally:
            self._stop.set()
            with contextlib.suppress(StoreUnavailable):
                self._store.attempts.tell_news()
            for thread in threads:
                thread.join()
            self._leave()

    def _list_chores(self) -> Iterator[tuple[str, Callable[[], Any], Callable[[], float]]]:
        """Yield name, work and pause of each chore."""
        every = self._chores
        beat_s = self._limits.heartbeat_s / every.beats_per_life
        yield "heartbeat", self._beat, lambda: beat_s
        yield "dispatch", self._dispatch, lambda: every.dispatch_s * self._fleet
        yield "preemption", self._make_room, lambda: every.reap_s * self._fleet
        yield "sweeps", self._stop_early, lambda: every.reap_s * self._fleet
        yield "reaper", self._reap, lambda: every.reap_s * self._fleet * random.uniform(0.5, 1.5)  # noqa: S311
        yield "expiry", self._expire, lambda: every.expire_s * self._fleet
        for desk in self._desks:
            yield desk.name, desk.tend, lambda: every.launch_s

    def _leave(self) -> None:
        """Take this host out of the service, with its jobs if they end with their worker."""
        self._supervisors.close()
        if self._settings.stop_jobs:
            sign_off(self._store, self._host)  # so that nothing more is placed here meanwhile
            grace_s, report_within_s = self._settings.stop_grace_s, self._chores.report_within_s
            self._registry.stop_all(self._supervisors.at_work(), grace_s, report_within_s)
        sign_off(self._store, self._host)
        self._store.close()
        self._tracing.close()

    def _describe_host(self) -> str:
        """Return a description of this host and its broker, whose address may hold a password."""
        report, settings = self._report, self._settings
        devices = [f"{count} x {name}" for name, count in Counter(report.cuda).items()]
        devices.append(f"{report.cpu_slots} CPU slots")
        devices += [f"the launcher {desk.name}" for desk in self._desks]
        broker = urlsplit(settings.broker_url)
        at = f"{broker.scheme}://{broker.netloc.rpartition('@')[2]}{broker.path}"
        user = f" as user {settings.broker_user}" if settings.broker_user else ""
        has = ", ".join(devices)
        return f"host {report.name} at {report.address} joins {at}{user} with {has}; data in {settings.layout.root}"

    def launch(self, ref: AttemptRef) -> None:
        """Start a supervisor for a part that was placed here. Any host can message any other, so a message that
        names another host, or no job, is ignored.
        """
        if ref.host != self._host or JOB_ID.fullmatch(ref.job_id) is None:
            logger.warning("ignored %r, which is not a part of a job on this host", ref)
            return
        if f"{ref.job_id}:{ref.attempt}" in self._registry.live():
            return
        devices = {"cuda": len(self._report.cuda), "cpu": self._report.cpu_slots}
        self._supervisors.start(SupervisorOrder.of(ref, self._address, self._settings, self._policy, devices))

    def _beat(self) -> None:
        offers = {desk.name: desk.description for desk in self._desks}
        now = replace(self._report, live=self._registry.live(), launchers=offers, overcommitted=overcommitment())
        reply = self._store.hosts.beat(now)
        self._registry.note_heartbeat()
        for ref in reply.kill:
            with log_fields(job=ref.job_id, attempt=ref.attempt):
                self._registry.kill(ref)
        self._supervisors.tend()
        self._store.counts.add(self._meter)
        # Hosts of allocations do no chores.
        self._fleet = max(1, sum(host.alive and host.allocation is None for host in self._store.hosts.list()))

    def _wait_for_news(self) -> None:
        """Wait until there may be work to hand out, or this worker stops."""
        until = time.monotonic() + self._chores.look_s * self._fleet * random.uniform(0.5, 1.5)  # noqa: S311
        while (left := until - time.monotonic()) > 0 and not self._stop.is_set():
            if self._store.attempts.wait_for_news(left):
                return

    def _dispatch(self) -> None:
        self._wait_for_news()
        watch = Stopwatch()
        placed = self._store.attempts.place()
        self._meter.observe("trivet_placement_seconds", watch.seconds)
        for job_id in placed:
            self._trace("place", job_id, watch, {})
        for ref in self._store.attempts.due():
            watch = Stopwatch()
            self._dispatcher.send(ref)
            self._trace("dispatch", ref.job_id, watch, {"attempt": ref.attempt, "host": ref.host})

    def _trace(self, name: str, job_id: str, watch: Stopwatch, attributes: Attributes) -> None:
        if self._tracing.is_on:
            parent = self._store.jobs.traceparent(job_id)
            self._tracing.record(name, parent, watch.began, watch.now, {"job": job_id, **attributes})

    def _reap(self) -> None:
        for job_id in self._store.attempts.reap():
            with log_fields(job=job_id):
                logger.warning("reaped an attempt of %s", job_id)

    def _make_room(self) -> None:
        if (made := self._store.preemptions.make_room()) is not None:
            logger.info("%s make room for %s", [victim.id for victim in made.victims], made.beneficiary.id)

    def _stop_early(self) -> None:
        while (judged := self._store.sweeps.stop_early()) is not None:
            for job_id, reason in ((each.job, each.reason) for each in judged[1]):
                with log_fields(job=job_id):
                    logger.info("%s: %s", job_id, reason)

    def _expire(self) -> None:
        for folder in remove_leftovers():
            logger.info("deleted %s, which a killed supervisor left behind", folder)
        for path in self._store.files.delete_abandoned():
            logger.info("deleted %s, an upload that was never finished", path)
        for desk in self._desks:
            desk.delete_leftovers(self._settings.layout)
        most = self._settings.max_cache_bytes
        for path in (*trim(self._settings.layout.cache, most), *trim(compiled_caches(), most, of_owners=True)):
            logger.info("deleted %s, the entry unused for the longest time", path)
        days = self._settings.keep_jobs_days
        while days is not None and not self._stop.is_set() and (gone := self._store.jobs.expire(days * _DAY_S)):
            for job_id in gone:
                logger.info("deleted %s, which ended more than %g days ago", job_id, days)

    def _repeat(self, work: Callable[[], Any], pause: Callable[[], float]) -> None:
        """Do a chore until the end, through broker outages. Any other error is logged, and the chore is tried again."""
        while not self._stop.is_set():
            wait_s = pause()
            try:
                work()
                self._outage.over()
            except (StoreUnavailable, OperationalError) as outage:
                self._outage.note(outage)
                wait_s = self._chores.outage_s
            except Exception:
                logger.exception("%s failed", threading.current_thread().name)
                wait_s = self._chores.outage_s
            self._stop.wait(wait_s)


def main() -> int:
    """Run the agent of this host (``python -m workers``) by the settings. Return 2 for unusable settings, a
    broker that refuses it, a name or an address that cannot be its own, or a data folder that it cannot close
    to other users.
    """
    try:
        settings = Settings()
        layout = "%(asctime)s %(name)s %(levelname)s %(message)s"
        log_to_stderr(settings.log_level, layout, settings.log_format, process="agent", host=settings.worker_name)
        close_to_others(settings.layout.root)
        chores = AgentSettings()
        store = Store.connect(settings.broker_url, settings.layout, settings.store_limits)
        with contextlib.closing(store):
            address = address_of(settings, settings.broker_url)
            check_admitted(store, settings, address, settings.heartbeat_s / chores.beats_per_life)
        agent = Agent(settings, chores)
    except (NotPrivateError, ValueError, OSError, BrokerRefused, CannotWork) as error:
        logger.error("%s", error)  # noqa: TRY400 - the reason is the whole message
        return 2
    agent.run()
    return 0
