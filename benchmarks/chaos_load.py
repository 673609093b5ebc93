"""Makes the load of a chaos run: a random mix of small jobs, and users who cancel, retry, resubmit and delete."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chaos_checks import Accepted, Violation
from chaos_service import retry_until_answered

from trivet import Client, Refused, TrivetError

_MLP = {"family": "mlp", "in_features": 64, "hidden": [16], "out_features": 10}
_BOX = {"lower": [-1.0] * 4, "upper": [1.0] * 4, "output": [{"coefficients": [1, -1], "threshold": -100.0}]}
_WRONG: tuple[Mapping[str, Any], ...] = (
    {"steps": -1},
    {"parallel": {"tp": 3}},
    {"model": {"family": "nope"}},
    {"nope": 1},
    {"batch": {"global": 7}, "parallel": {"dp_shard": 2}},
)


@dataclass
class Load:
    """Keeps ``backlog`` jobs unfinished until :attr:`ended` is set; ``accepted`` has all that were answered 201."""

    client: Client
    seed: int
    backlog: int
    jobs: int = 0
    """The most jobs that are submitted; 0 for no limit."""
    ended: threading.Event = field(default_factory=threading.Event)
    accepted: dict[str, Accepted] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    refused: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def run(self) -> None:
        try:
            while not self.ended.is_set():
                self._keep_up()
                self._meddle()
                self.ended.wait(self._random.uniform(0.5, 3.0))
        except TrivetError as error:
            self.violations.append(Violation("the service answers", str(error)))

    def _keep_up(self) -> None:
        """Submit jobs until the backlog is full."""
        try:
            room = self.backlog - len(self.unfinished())
        except TrivetError:
            room = 2
        for _ in range(min(room, 4)):
            if self.has_more_to_submit or not self.jobs:
                self._submit()

    @property
    def has_more_to_submit(self) -> bool:
        """Return whether more jobs may be submitted."""
        return len(self.accepted) < self.jobs

    def unfinished(self) -> list[str]:
        """Return the ids of this run's jobs that have not ended."""
        states = ("queued", "starting", "running", "cancelling")
        return [job.id for state in states for job in self.client.jobs(state=state, label=f"chaos=s{self.seed}")]

    def train(self) -> str:
        """Submit a short training that nobody cancels, and return its id."""
        train = {"kind": "train", "model": _MLP, "data": {"source": "digits"}, "batch": {"global": 64}}
        spec = {**train, "steps": 20, "device": "cpu", "labels": {"chaos": f"s{self.seed}"}, "name": "train"}
        key = f"chaos-{self.seed}-train"
        job = retry_until_answered(lambda: self.client.submit(spec, idempotency_key=key))
        self.accepted[job.id] = Accepted("short", spec, key)
        return job.id

    def _submit(self) -> None:
        form, spec = self._spec()
        key = f"chaos-{self.seed}-{self._random.getrandbits(64):x}"
        try:
            job = retry_until_answered(lambda: self.client.submit(spec, idempotency_key=key))
        except Refused as refusal:
            if form not in ("wrong", "dependent"):
                self.violations.append(Violation("good specs are accepted", f"{form}: {refusal}"))
            self.refused += 1
            return
        if form == "wrong":
            self.violations.append(Violation("bad specs are refused", f"{job.id}: {spec}"))
        self.accepted[job.id] = Accepted(form, spec, key)
        if len(self.accepted) % 6 == 1:
            threading.Thread(target=self._follow, args=(job.id,), daemon=True).start()

    def _follow(self, job_id: str) -> None:
        accepted, got = self.accepted[job_id], []
        try:
            for event in self.client.follow(job_id):
                if event["type"] == "gap":
                    accepted.gaps += 1
                else:
                    got.append(event["id"])
        except TrivetError:
            return  # deleted meanwhile, or away for longer than a follower waits
        accepted.followed = got

    def _meddle(self) -> None:
        """Act on one job like a user, with one chance in two."""
        ids = [job_id for job_id, accepted in self.accepted.items() if not accepted.deleted]
        if not ids:
            return
        recent, any_id, dice = self._random.choice(ids[-14:]), self._random.choice(ids), self._random.random()
        if dice < 0.25:
            self._cancel(recent)
        elif dice < 0.4:
            self._retry(any_id)
        elif dice < 0.5:
            self.resubmit(recent)
        elif dice < 0.55:
            self._delete(any_id)

    def _cancel(self, job_id: str) -> None:
        self.accepted[job_id].cancels += 1
        try:
            retry_until_answered(lambda: self.client.cancel(job_id))
        except Refused as refusal:
            if refusal.status != 409:
                self.violations.append(Violation("cancel", f"{job_id}: {refusal}"))

    def _retry(self, job_id: str) -> None:
        """Ask once: a second request after a lost answer could count for another end."""
        accepted = self.accepted[job_id]
        try:
            self.client.retry(job_id)
            accepted.retries += 1
        except Refused as refusal:
            accepted.retries_unknown |= refusal.status >= 500
        except TrivetError:
            accepted.retries_unknown = True

    def resubmit(self, job_id: str) -> None:
        """Submit a job again under its idempotency key: it is the same job."""
        accepted = self.accepted[job_id]
        spec, key = accepted.spec, accepted.idempotency_key
        try:
            again = retry_until_answered(lambda: self.client.submit(spec, idempotency_key=key))
        except Refused as refusal:
            self.violations.append(Violation("one job for one idempotency key", f"{job_id}: {refusal}"))
            return
        if again.id != job_id:
            self.violations.append(Violation("one job for one idempotency key", f"{job_id}, again {again.id}"))

    def _delete(self, job_id: str) -> None:
        try:
            retry_until_answered(lambda: self.client.delete(job_id))
        except Refused as refusal:
            if refusal.status != 404:  # 409: it has not ended
                return
        self.accepted[job_id].deleted = True

    def _spec(self) -> tuple[str, dict[str, Any]]:
        choose = self._random.choice
        forms = ("short", "long", "verify", "dependent", "timeout", "wrong")
        form = self._random.choices(forms, (4, 5, 2, 2, 1, 1))[0]
        layout = choose([{}, {"dp_shard": 2}, {"tp": 2}])
        common = {"labels": {"chaos": f"s{self.seed}"}, "name": form, "device": "cpu"}
        train = {
            **common, "kind": "train", "model": _MLP, "data": {"source": "digits"}, "batch": {"global": 64},
            "seed": self._random.randrange(1000),
        }  # fmt: skip
        match form:
            case "short":
                steps, checkpoint = self._random.randrange(5, 200), {"every": 20}
                retries = choose([0, 1, 3])
                return form, {**train, "steps": steps, "parallel": layout, "retries": retries, "checkpoint": checkpoint}
            case "long":
                steps, checkpoint = self._random.randrange(600, 2500), {"every": choose([25, 100])}
                retries = choose([0, 2, 5])
                return form, {**train, "steps": steps, "parallel": layout, "retries": retries, "checkpoint": checkpoint}
            case "timeout":
                return form, {**train, "steps": 10**6, "timeout_s": 8, "checkpoint": {"every": 500}}
            case "verify":
                small = {"family": "mlp", "in_features": 4, "hidden": [8], "out_features": 2}
                mesh, method = choose([{}, {"tp": 2}]), choose(["ibp", "crown"])
                verify = {"kind": "verify", "model": small, "property": {"box": _BOX}, "method": method}
                return form, {**common, **verify, "parallel": mesh, "retries": choose([0, 2])}
            case "dependent" if trained := self._trained():
                robustness = {"robustness": {"data": {"source": "digits"}, "count": 8, "eps": 0.01}}
                verify = {"kind": "verify", "model": {"job": choose(trained)}, "property": robustness}
                return form, {**common, **verify, "method": "crown", "retries": choose([0, 2])}
        return "wrong", {**train, "name": "wrong", "steps": 3, **choose(_WRONG)}

    def _trained(self) -> list[str]:
        kinds = ("short", "long")
        return [job_id for job_id, job in self.accepted.items() if job.form in kinds and not job.deleted]
