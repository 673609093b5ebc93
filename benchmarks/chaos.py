"""Injects random faults into a ``trivet up`` of its own, and then checks its promises from outside.

    python benchmarks/chaos.py --seconds 300 --seed 1 [--out report.json]

Jobs are submitted, cancelled, retried and deleted while parts of the service and ranks are killed, stopped and
terminated at random. After the faults every job must end, and the service's promises are checked: see
``chaos_checks.py``. Exit code 0 when every promise held, 1 otherwise. Needs Linux, one host and no GPU. With
``--launcher slurm`` or ``ray`` jobs run on a cluster of two nodes that the run starts here, whose parts fall too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from chaos_checks import Accepted, Violation, check_artifact, check_devices, check_job
from chaos_clusters import Cluster, cluster_of
from chaos_faults import Fault, faults
from chaos_load import Load
from chaos_service import Group, Service, retry_until_answered

from service.jobs.files import DataLayout
from service.jobs.records import Job
from trivet import Client, Refused, TrivetError

_SAMPLE_S = 0.3
_OVERLAP_S = 1.0
"""Seconds for which ranks of two attempts may be seen together before they count as living together."""


@dataclass(frozen=True)
class Options:
    """How long faults are injected, in seconds, and of what kind; see ``--help``."""

    seed: int
    seconds: float
    lease_s: float
    gap_s: tuple[float, float]
    quiet_s: float
    backlog: int
    plant: bool
    only: tuple[str, ...] = ()
    launcher: str = "local"
    jobs: int = 0
    """Faults are injected until so many jobs are accepted, and no more are submitted; 0 for as many as there is time
    for.
    """


@dataclass
class Chaos:
    """One run against a service that has been started."""

    options: Options
    service: Service
    client: Client
    load: Load
    cluster: Cluster | None = None
    violations: list[Violation] = field(default_factory=list)
    told: list[dict[str, Any]] = field(default_factory=list)
    """The faults, as the report has them."""
    over: threading.Event = field(default_factory=threading.Event)
    _together: dict[str, float] = field(default_factory=dict)
    _timers: list[threading.Timer] = field(default_factory=list)

    def run(self) -> list[tuple[Job, list[dict[str, Any]]]]:
        """Inject faults, wait for quiet, check; return the ended jobs with their events."""
        try:
            return self._run()
        except TrivetError as error:
            for violation in (*self.load.violations, Violation("the service answers", str(error))):
                self._violate(violation)
            return []
        finally:
            self.over.set()

    def _run(self) -> list[tuple[Job, list[dict[str, Any]]]]:
        threads = [threading.Thread(target=work, daemon=True) for work in (self.load.run, self._watch)]
        for thread in threads:
            thread.start()
        self._let_faults_fall()
        say("no more faults; waiting for all jobs to end")
        for timer in self._timers:
            timer.join()
        self.load.ended.set()
        threads[0].join()
        trained = self.load.train() if self.options.plant else None
        self._settle()
        self._check_nothing_left()
        self.over.set()
        if trained is not None:
            self._plant(trained)
        return self._check_jobs()

    def _let_faults_fall(self) -> None:
        draw = random.Random(self.options.seed + 1000)
        menu = faults(self.options.lease_s, self.options.launcher, self.options.only)
        until = time.monotonic() + self.options.seconds
        time.sleep(min(5.0, self.options.seconds / 4))
        while time.monotonic() < until or self.load.has_more_to_submit:
            fault = draw.choices(menu, [fault.weight for fault in menu])[0]
            with contextlib.suppress(psutil.Error):
                self._fall(fault, draw)
            time.sleep(draw.uniform(*self.options.gap_s))

    def _fall(self, fault: Fault, draw: random.Random) -> None:
        found = self.service.processes()
        group: Group | None = None
        candidates: Sequence[psutil.Process] = found.by_role.get(fault.role, [])
        if fault.role in ("supervisor", "keeper", "launcher", "rank"):
            having = sorted(name for name, group in found.groups.items() if group.get(fault.role))
            if not having:
                return
            group = draw.choice(having)
            candidates = found.groups[group][fault.role]
        if not candidates:
            return
        target = draw.choice(sorted(candidates, key=lambda process: process.pid))
        words = target.cmdline()
        target.send_signal(fault.signal)
        self._tell(fault, target, group)
        if fault.stopped_s:
            timer = threading.Timer(fault.stopped_s, _resume, (target,))
            timer.start()
            self._timers.append(timer)
        if fault.signal == signal.SIGKILL and fault.role in ("up", "slurmctld", "slurmd"):
            time.sleep(draw.uniform(0.0, self.options.lease_s / 2))
            if fault.role == "up":
                self.service.start()
            elif self.cluster is not None:
                self.cluster.revive(fault.role, words)

    def _tell(self, fault: Fault, target: psutil.Process, group: Group | None) -> None:
        row = {"role": fault.role, "signal": fault.signal.name, "stopped_s": fault.stopped_s, "group": group}
        self.told.append({"at": round(time.monotonic() - _BEGAN, 1), **row})
        where = f" of {group[0]}:{group[1]}" if group else ""
        say(f"{fault.signal.name} to {fault.role} {target.pid}{where}")

    def _watch(self) -> None:
        while not self.over.wait(_SAMPLE_S):
            with contextlib.suppress(psutil.Error, TrivetError):
                if self.service.process is not None and self.service.process.poll() not in (None, -signal.SIGKILL):
                    self._violate(Violation("the service goes on", "trivet up ended although nobody ended it"))
                    return
                self._watch_attempts()
                for violation in check_devices(self.client.hosts()):
                    self._violate(violation)

    def _watch_attempts(self) -> None:
        """Two attempts of a job never have live ranks together. Stopped ones do nothing and count as dead."""
        live: dict[str, set[int]] = {}
        for (job_id, attempt), group in self.service.processes().groups.items():
            if any(_acts(rank) for rank in group["rank"]):
                live.setdefault(job_id, set()).add(attempt)
        now = time.monotonic()
        self._together = {
            job_id: self._together.get(job_id, now) for job_id, attempts in live.items() if len(attempts) > 1
        }
        for job_id, since in self._together.items():
            if now - since > _OVERLAP_S:
                self._violate(Violation("one attempt at a time", f"{job_id}: attempts {sorted(live[job_id])} at once"))

    def _settle(self) -> None:
        deadline = time.monotonic() + self.options.quiet_s
        left = ["?"]
        while left and time.monotonic() < deadline:
            with contextlib.suppress(TrivetError):
                left = self.load.unfinished()
            time.sleep(1)
        for job_id in left:
            why = self.client.job(job_id).reason
            self._violate(Violation("every job ends", f"{job_id} has not, {self.options.quiet_s:g} s after: {why}"))

    def _check_nothing_left(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            held = [(host.name, part.job) for host in self.client.hosts() for part in host.held]
            ranks = [process.pid for process in self.service.processes().by_role.get("rank", [])]
            asked = self.cluster.allocations() if self.cluster is not None else []
            if not (held or ranks or asked) or time.monotonic() > deadline:
                break
            time.sleep(1)
        if held:
            self._violate(Violation("devices come back", f"after everything ended: {held}"))
        if asked:
            self._violate(Violation("devices come back", f"the cluster still has {asked}"))
        if ranks:
            self._violate(Violation("no process is left behind", f"ranks {ranks}"))

    def _check_jobs(self) -> list[tuple[Job, list[dict[str, Any]]]]:
        checked = []
        for job_id, accepted in self.load.accepted.items():
            job = self._ended(job_id, accepted)
            if job is None:
                continue
            events = self._events(job_id)
            checked.append((job, events))
            for violation in check_job(job, events, accepted):
                self._violate(violation)
            for violation in self._check_artifacts(job):
                self._violate(violation)
            if len(checked) <= 60:
                self.load.resubmit(job_id)
        for violation in self.load.violations:
            self._violate(violation)
        return checked

    def _ended(self, job_id: str, accepted: Accepted) -> Job | None:
        try:
            return retry_until_answered(lambda: self.client.job(job_id))
        except Refused as refusal:
            if not (refusal.status == 404 and accepted.deleted):
                self._violate(Violation("no accepted job is lost", f"{job_id}: {refusal}"))
            return None

    def _events(self, job_id: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        after = None
        while True:
            page = retry_until_answered(lambda after=after: self.client.events(job_id, after=after, limit=1000))
            items += page["items"]
            if not page["items"]:
                return items
            after = page["next_after"]

    def _check_artifacts(self, job: Job) -> list[Violation]:
        artifacts = self.client.artifacts(job.id)
        names = [artifact.name for artifact in artifacts]
        found = []
        if job.kind == "train" and job.state == "succeeded" and "model.safetensors" not in names:
            found.append(Violation("success is complete", f"{job.id}: no model.safetensors among {names}"))
        with tempfile.TemporaryDirectory() as folder:
            for artifact in artifacts:
                target = Path(folder) / "content"
                self.client.download(job.id, artifact.name, target)
                found += check_artifact(job.id, artifact, target.read_bytes())
        return found

    def _plant(self, job_id: str) -> None:
        """Break a promise on purpose: change a byte of a published model behind the service's back."""
        (model,) = (each for each in self.client.artifacts(job_id) if each.name == "model.safetensors")
        path = DataLayout(self.service.data).job(job_id).published / str(model.sha256)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        say(f"planted a violation in {path}")

    def _violate(self, violation: Violation) -> None:
        if violation not in self.violations:
            self.violations.append(violation)
            say(f"VIOLATION {violation}")


_BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - _BEGAN:7.1f}] {text}", flush=True)


def _acts(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _resume(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)


def report(chaos: Chaos, checked: Sequence[tuple[Job, Sequence[dict[str, Any]]]]) -> dict[str, Any]:
    """Return the run's figures as plain data."""
    jobs = [job for job, _ in checked]
    return {
        **asdict(chaos.options),
        "accepted": len(chaos.load.accepted),
        "refused": chaos.load.refused,
        "deleted": sum(accepted.deleted for accepted in chaos.load.accepted.values()),
        "states": Counter(job.state for job in jobs),
        "failures": Counter(job.error.type for job in jobs if job.error is not None),
        "attempts": sum(job.attempt for job in jobs),
        "events": sum(len(events) for _, events in checked),
        "followed": sum(accepted.followed is not None for accepted in chaos.load.accepted.values()),
        "signals": Counter(f"{fault['role']} {fault['signal']}" for fault in chaos.told),
        "faults": chaos.told,
        "violations": [str(violation) for violation in chaos.violations],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="how long faults fall")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lease-s", type=float, default=15.0, help="the service's TRIVET_LEASE_S")
    parser.add_argument("--gap-s", type=float, nargs=2, default=(3.0, 9.0), help="least and longest pause of faults")
    parser.add_argument("--quiet-s", type=float, default=300.0, help="what all jobs get to end after the last fault")
    parser.add_argument("--backlog", type=int, default=8, help="unfinished jobs that are kept up")
    parser.add_argument("--jobs", type=int, default=0, help="go on until so many jobs are accepted, and submit no more")
    parser.add_argument("--only", default="", help="roles, or role:SIGNAL, separated by commas")
    parser.add_argument(
        "--launcher", choices=("local", "slurm", "ray"), default="local", help="what gives devices to jobs"
    )
    parser.add_argument("--plant", action="store_true", help="break a promise at the end, which the run must notice")
    parser.add_argument("--out", type=Path, help="file for the report")
    given = vars(parser.parse_args(arguments))
    out = given.pop("out")
    given |= {"gap_s": tuple(given["gap_s"]), "only": tuple(filter(None, given["only"].split(",")))}
    options = Options(**given)
    found = _run(options)
    text = json.dumps(found, indent=1, default=str)
    if out is not None:
        out.write_text(text)
    print(text)
    return 1 if found["violations"] else 0


def _run(options: Options) -> dict[str, Any]:
    """Start a service, and a cluster if one provides the devices, inject faults, and return the report."""
    with tempfile.TemporaryDirectory(prefix="trivet-chaos-") as name, contextlib.ExitStack() as started:
        folder = Path(name).resolve()
        settings = {"TRIVET_LEASE_S": str(options.lease_s), "TRIVET_CPU_SLOTS": "4", "TRIVET_API_PROCESSES": "2"}
        service = Service(folder / "data", settings)
        if (cluster := cluster_of(options.launcher, folder)) is not None:
            started.callback(cluster.stop)
            service = Service(service.data, {**settings, **cluster.start()}, cluster.role)
        started.callback(service.stop)
        service.start()
        client = service.client()
        chaos = Chaos(options, service, client, Load(client, options.seed, options.backlog, options.jobs), cluster)
        return report(chaos, chaos.run())


if __name__ == "__main__":
    sys.exit(main())
