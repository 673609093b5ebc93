"""A service of one worker that gets the devices of all jobs from a scheduler."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from local_service import give_way
from waiting import LIMIT_S, eventually
from worker_fleet import MortalBroker, train_spec

from service.jobs.files import DataLayout
from service.jobs.records import Allocation, Job
from service.jobs.store import Store, StoreUnavailable
from workers.agent.launching import service_of


class Site:
    """A service whose only worker has no devices of its own, and asks a scheduler for them.

    Tests share one: broker and worker take seconds to start.
    """

    def __init__(self, launcher: str, folder: Path, **variables: str) -> None:
        """``variables`` are further ones of the worker's environment."""
        self._launcher, self._data, self._log = launcher, DataLayout(folder / "data"), folder / "worker.log"
        self.broker = MortalBroker(folder / "broker")
        self.store = Store.connect(self.broker.server.url, self._data)
        self.service = service_of(self._data)
        self._submitted = list[Job]()
        self._environment = os.environ | {
            "TRIVET_DATA": str(self._data.root),
            "TRIVET_REDIS_URL": self.broker.server.url,
            "TRIVET_WORKER_NAME": "login",
            "TRIVET_CPU_SLOTS": "0",
            "TRIVET_LAUNCHERS": launcher,
            "TRIVET_WARM_SUPERVISORS": "0",
            "TRIVET_STOP_GRACE_S": "20",
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        self.start()

    def close(self) -> None:
        """End worker and broker."""
        self.worker.terminate()
        self.worker.wait(LIMIT_S)
        self.store.close()
        self.broker.down()

    def clear(self) -> None:
        """End what a test has left."""
        while self._submitted:
            job = self._submitted.pop()
            if self.now(job).ended_at is None:
                self.store.jobs.cancel(job.id)
            self.ended(job)

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.worker = subprocess.Popen(
                [sys.executable, "-m", "workers"], env=self._environment, stdout=log, stderr=log
            )

    def restart(self) -> None:
        """Kill the worker, and start it again."""
        self.worker.kill()
        self.worker.wait(LIMIT_S)
        self.start()

    def submit(self, name: str, ranks: int, **fields: Any) -> Job:
        fields = {"launcher": self._launcher, "max_hosts": 2, "batch": {"global": 12 * ranks}, "steps": 10} | fields
        self._submitted.append(self.store.jobs.submit(train_spec(name, ranks, **fields), "tester")[0])
        return self._submitted[-1]

    def now(self, job: Job) -> Job:
        return self.store.jobs.get(job.id)

    def ended(self, job: Job) -> Job:
        def look() -> Job | None:
            try:
                return now if (now := self.now(job)).ended_at is not None else None
            except StoreUnavailable:
                return None

        return eventually(look, within_s=5 * LIMIT_S)

    def ended_as_anywhere(self, job: Job, devices: Sequence[int]) -> Allocation:
        """Wait for the end of a gang over so many devices of its hosts; its states and its end are those of any job."""
        ended = self.ended(job)
        assert (ended.state, ended.attempt, ended.launcher) == ("succeeded", 1, self._launcher), self.said()
        assert [len(share.devices) for share in ended.placement] == list(devices)
        assert [event["state"] for event in self.events(job, "state")] == ["queued", "starting", "running", "succeeded"]
        assert ended.allocation is not None
        return ended.allocation

    def all_ended(self, jobs: Sequence[Job]) -> bool:
        """Tell whether none of them goes on."""
        return all(self.now(job).ended_at is not None for job in jobs)

    def history(self, job: Job) -> list[dict[str, Any]]:
        """Return all its events, with their ids."""
        page = self.store.events.page(job.id, after="0-0", types=None, limit=100_000)
        return [{**item.event, "id": item.id} for item in page.items]

    def failures(self, jobs: Sequence[Job]) -> list[tuple[Any, ...]]:
        """Tell of those that did not succeed: how they ended, and what their states and errors were on the way."""
        return [
            (job.id, job.state, job.reason, job.error, *self.events(job, "state", "error"))
            for job in map(self.now, jobs)
            if job.state != "succeeded"
        ]

    def until(self, job: Job, state: str) -> Job:
        return eventually(lambda: now if (now := self.now(job)).state == state else None, within_s=2 * LIMIT_S)

    def events(self, job: Job, *types: str) -> list[dict[str, Any]]:
        page = self.store.events.page(job.id, after="0-0", types=set(types), limit=10_000)
        return [item.event for item in page.items]

    def steps(self, job: Job) -> list[int]:
        """Return the steps whose loss it told, in the order in which they were taken."""
        return [event["step"] for event in self.events(job, "metric") if "loss" in event["values"]]

    def works(self, job: Job) -> None:
        """Its ranks have taken steps; they leave the processors to others from now on."""
        eventually(lambda: self.events(job, "metric"), within_s=2 * LIMIT_S)
        give_way(job.id)

    def said(self) -> str:
        printed = [path.read_text() for path in self._data.launcher(self._launcher).glob("*.log")]
        return "\n".join([self._log.read_text(), *printed])
