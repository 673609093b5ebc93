"""Accepts sweeps and chains, a parent and its jobs by one script, and stops jobs early by their sweep's rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

from pydantic import TypeAdapter

from service.jobs.records import Job, Rejected
from service.jobs.records.store_limits import StoreLimits
from service.jobs.spec.common import AnyRule, CommonSpec, Reported, Standing, StoppedJob, StoppingRule, judge
from service.jobs.store import decode, stubs
from service.jobs.store.client import BrokerClient
from service.jobs.store.decode import json_of
from service.jobs.store.jobs import Jobs, other_body
from service.jobs.store.late_refusals import LATE_REFUSALS, refuse_over_quota
from service.jobs.store.submission import Submission
from service.jobs.submission.chains import ChainedJob, is_stand_in
from service.jobs.submission.request import joined
from service.jobs.submission.sweeps import Parameters

_RULE: TypeAdapter[StoppingRule] = TypeAdapter(AnyRule)
_MOST_JUDGED = 100
"""Values that one call judges."""


@dataclass(frozen=True)
class Sweeps:
    """Writes sweeps and chains, whose jobs are then like all others."""

    client: BrokerClient
    limits: StoreLimits
    jobs: Jobs

    def accept(self, parent: Submission, children: Sequence[tuple[Parameters, CommonSpec]]) -> tuple[Job, bool]:
        """Accept a sweep that was checked, with all its jobs; return its parent, and whether it is new.

        Raises like :meth:`Jobs.accept`.
        """
        assert parent.spec.sweep is not None
        best, rule = parent.spec.sweep.best, parent.spec.sweep.stop
        entries = [_child(parent, parameters, spec) for parameters, spec in children]
        asked = {} if best is None else {"metric": best.metric, "mode": best.mode}
        if rule is not None:
            asked |= {"rule": rule.model_dump_json(), "follows": rule.metric}
        return self._accept(parent, entries, [(spec, parent.path) for _, spec in children], asked)

    def accept_chain(self, parent: Submission, chain: Sequence[ChainedJob]) -> tuple[Job, bool]:
        """Accept a chain that was checked, each job behind those that it needs, like :meth:`accept`."""
        specs = [each.spec for each in chain]
        submissions = self.jobs.batch(specs, parent.owner, project=parent.project)
        entries = [_link(*pair) for pair in zip(submissions, chain, strict=True)]
        return self._accept(parent, entries, [(each.spec, joined(parent.path, f"jobs.{each.name}")) for each in chain])

    def _accept(
        self,
        parent: Submission,
        children: Sequence[dict[str, object]],
        places: Sequence[tuple[CommonSpec, str]],
        asked: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[Job, bool]:
        """Accept entries of jobs, whose specs are at these places of the request."""
        outcome, job_id, state, refused = stubs.submit_sweep(
            self.client,
            limits=self.limits.script_argument,
            parent=json_of(_without_devices(parent)),
            children=json_of(children),
            asked=json_of(dict(asked)),
        )
        if outcome == "conflict":
            raise other_body(job_id)
        refuse_over_quota(self.client, outcome, job_id, state)
        if outcome in LATE_REFUSALS:
            spec, place = ((parent.spec, parent.path), *places)[refused]
            raise Rejected([LATE_REFUSALS[outcome](spec, place, job_id, state)])
        return self.jobs.get(job_id), outcome == "created"

    def stop_early(self) -> tuple[str, Sequence[StoppedJob]] | None:
        """Judge new values of one sweep by its rule, and tell the jobs that stop; return the sweep and these, or
        ``None`` if there was nothing to judge. Any process may call this at any time.
        """
        if not (seen := stubs.read_unjudged(self.client)):
            return None
        sweep, rule, judged, values, jobs = seen
        standing = Standing(
            reported=_reported(values),
            judged=int(judged),
            states={job: state for job, state, _ in jobs},
            told={job: int(step) for job, _, step in jobs if step},
        )
        found = judge(_RULE.validate_json(rule), standing, _MOST_JUDGED)
        stopped = json_of([asdict(each) for each in found.stopped])
        kept = stubs.end_early(self.client, sweep, standing.judged, found.judged, stopped) == 1
        return sweep, found.stopped if kept else ()


def _reported(values: Sequence[str]) -> list[Reported]:
    """Return the values of a sweep in the order of arrival."""
    found: list[tuple[int, Reported]] = []
    for place, kept in decode.fields_of(list(values)).items():
        job, _, step = place.rpartition(":")
        number, _, value = kept.partition(" ")
        found.append((int(number), Reported(job, int(step), float(value))))
    return [each for _, each in sorted(found, key=lambda each: each[0])]


def _without_devices(parent: Submission) -> dict[str, object]:
    """Return the entry of a parent: it needs no devices, notifies no one, and its jobs wait in its stead for
    those that it names.
    """
    entry = parent.entry()
    record = {name: value for name, value in parent.record().items() if name not in ("shape", "exports")}
    return {**entry, "record": {**record, "after": "[]"}, "after": []}


def _child(parent: Submission, parameters: Parameters, spec: CommonSpec) -> dict[str, object]:
    text = spec.model_dump_json(by_alias=True)
    submission = Submission(
        "", spec, parent.owner, parent.project, text, idem="", body_hash="", launcher=spec.launcher or parent.launcher
    )
    record = {**submission.record(), "parameters": json_of(parameters)}
    if spec.notify is not None:
        record["notify_on"] = ""  # those of the sweep are told; the numbers that reach thresholds are its jobs'
    return {**submission.entry(), "record": record}


def _link(submission: Submission, job: ChainedJob) -> dict[str, object]:
    """Return the entry of a job of a chain: the script knows the ids of the others, which it waits for."""
    entry = {**submission.entry(), "record": {**submission.record(), "parameters": json_of({"job": job.name})}}
    needed = [job_id for job_id in submission.needed if not is_stand_in(job_id)]
    return {**entry, "after": needed, "stand_in": job.stand_in, "links": job.names}
