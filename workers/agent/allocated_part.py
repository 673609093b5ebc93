"""Carries out one part of one attempt on a host of an allocation, with a supervisor that has been started already.

It reports the host, begins the attempt once all hosts of the allocation have reported, and gives the supervisor
its order. It leaves when the part has ended here. On SIGTERM, ranks write a checkpoint and the job goes back to
the queue.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from types import FrameType

from service.jobs.files import remove_tree, trim
from service.jobs.host import SupervisorRegistry
from service.jobs.records import AllocatedDevices, Allocation, AttemptRef
from service.jobs.settings import Settings
from service.jobs.store import BrokerRefused, HostReport, Store, StoreUnavailable
from service.jobs.text import log_to_stderr
from workers.agent.admission import address_of, sign_off
from workers.inventory import threads_by_pool, versions
from workers.launcher.confinement import available
from workers.launchers import AllocatedHost, launcher_class
from workers.supervisor.attempt_folder import compiled_caches
from workers.supervisor.group import remove_leftovers
from workers.supervisor.job_policy import JobPolicy
from workers.supervisor.settings import SupervisorOrder

_LOOK_S = 0.05
_BEATS_PER_LIFE = 5
_OUTAGE_S = 0.5
_REPORT_WITHIN_S = 10.0

logger = logging.getLogger(__name__)


class _HostOfAllocation:
    """Runs one part of one attempt."""

    def __init__(
        self, launcher: str, here: AllocatedHost, settings: Settings, job_id: str, supervisor: subprocess.Popen[bytes]
    ) -> None:
        self._settings, self._job_id, self._supervisor = settings, job_id, supervisor
        policy = JobPolicy.of(settings)
        # Nothing of the service needs the allocation's cores.
        self._policy = replace(policy, limits=replace(policy.limits, niceness=0))
        self._names = [f"{launcher}-{here.allocation}-{index}" for index in range(here.count)]
        self._allocation = Allocation(launcher=launcher, id=here.allocation, facts=dict(here.facts))
        self._store = Store.connect(settings.broker_url, settings.layout, settings.store_limits)
        self._folder = settings.layout.host(self._names[here.index])
        self._folder.mkdir(parents=True, exist_ok=True)
        self._registry = SupervisorRegistry(self._folder)
        devices = AllocatedDevices(
            launcher=launcher, id=here.allocation, job=job_id, pool=here.pool, devices=here.devices
        )
        self._report = HostReport(
            name=self._names[here.index],
            address=address_of(settings, settings.broker_url),
            allocation=devices,
            versions=versions(),
            threads=threads_by_pool({here.pool: here.devices}, os.environ),
            isolation=("limits",) if self._policy.isolation == "none" else available(),
        )
        self._asked_to_stop, self._left = threading.Event(), threading.Event()

    def run(self) -> int:
        """Return 0 when the part has ended or is not wanted any more, and 1 if other hosts did not come."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        beats = threading.Thread(target=self._beat_forever, daemon=True)
        beats.start()
        try:
            attempt = self._begin()
            if attempt is not None:
                ref = AttemptRef(self._job_id, attempt, self._report.name)
                self._order(ref)
                self._see_it_end(ref)
        except TimeoutError as error:
            logger.error("%s", error)  # noqa: TRY400 - the reason is the whole message
            return 1
        else:
            return 0
        finally:
            self._end_supervisor()
            self._left.set()
            beats.join()
            self._leave()

    def _stop(self, _: int, __: FrameType | None) -> None:
        self._asked_to_stop.set()

    def _begin(self) -> int | None:
        """Begin the attempt, or learn that another host did; return ``None`` if the job has no use for this
        allocation.

        Raises ``TimeoutError`` if a host does not come within the time for claiming a part.
        """
        until = time.monotonic() + self._settings.starting_lease_s
        while not self._asked_to_stop.wait(_LOOK_S):
            try:
                answer = self._store.launching.place(self._job_id, self._allocation, self._names)
            except StoreUnavailable as outage:
                logger.warning("waiting for the broker: %s", outage)
                self._asked_to_stop.wait(1.0)
                continue
            if isinstance(answer, int):
                return answer
            if answer == "over":
                logger.info("%s has no use for %s", self._job_id, self._allocation.id)
                return None
            if time.monotonic() > until:
                raise TimeoutError(f"of {', '.join(self._names)} some did not report in time; giving up")
        return None

    def _order(self, ref: AttemptRef) -> None:
        order = SupervisorOrder.of(ref, self._report.address, self._settings, self._policy, {})
        assert self._supervisor.stdin is not None
        with contextlib.suppress(OSError), self._supervisor.stdin as pipe:  # its end is seen below
            pipe.write(order.to_line())

    def _see_it_end(self, ref: AttemptRef) -> None:
        """Return when the supervisor has ended, and the store knows that nothing of the part is left here."""
        while self._supervisor.poll() is None and not self._asked_to_stop.wait(_LOOK_S):
            pass
        self._end_supervisor()
        until = time.monotonic() + 2 * self._settings.lease_s
        while time.monotonic() < until and self._is_held(ref):
            time.sleep(_LOOK_S)

    def _is_held(self, ref: AttemptRef) -> bool:
        try:
            hosts = self._store.hosts.list()
        except StoreUnavailable:
            return True
        return any(ref.job_id in host.running for host in hosts if host.name == ref.host)

    def _end_supervisor(self) -> None:
        """Have running ranks write a checkpoint, and give the part back."""
        if self._supervisor.stdin is not None:
            self._supervisor.stdin.close()
        if self._supervisor.poll() is None:
            launched = [self._supervisor.pid]
            self._registry.stop_all(launched, self._settings.stop_grace_s, _REPORT_WITHIN_S)
        self._supervisor.wait()

    def _beat_forever(self) -> None:
        pause_s = 0.0
        while not self._left.wait(pause_s):
            try:
                with contextlib.suppress(OSError):  # folders that have had no beat for a day are removed
                    os.utime(self._folder)
                reply = self._store.hosts.beat(replace(self._report, live=self._registry.live()))
                for ref in reply.kill:
                    self._registry.kill(ref)
                pause_s = self._settings.heartbeat_s / _BEATS_PER_LIFE
            except StoreUnavailable as outage:
                logger.warning("no heartbeat: %s", outage)
                pause_s = _OUTAGE_S
            except Exception:
                logger.exception("the heartbeat failed")
                pause_s = _OUTAGE_S

    def _leave(self) -> None:
        sign_off(self._store, self._report.name)
        self._store.close()
        remove_tree(self._folder)
        # No worker on this host does this.
        remove_leftovers()
        trim(compiled_caches(), self._settings.max_cache_bytes, of_owners=True)


def run(launcher: str, job_id: str, supervisor: subprocess.Popen[bytes]) -> int:
    """Run until the part has ended; return 2 if the broker refuses this host."""
    settings = Settings()
    here = launcher_class(launcher).here(os.environ)
    fields: dict[str, str | int] = {"process": "allocated host", "job": job_id}
    log_to_stderr(settings.log_level, f"%(asctime)s {job_id} %(levelname)s %(message)s", settings.log_format, **fields)
    try:
        return _HostOfAllocation(launcher, here, settings, job_id, supervisor).run()
    except BrokerRefused as error:
        logger.error("%s", error)  # noqa: TRY400 - the reason is the whole message
        return 2
