"""Describes what is stored of a submitted job, and what the store may still refuse when it is written."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from types import MappingProxyType

import orjson

from service.jobs.checks.files import files_of
from service.jobs.launchers import LOCAL
from service.jobs.projects import DEFAULT_PROJECT
from service.jobs.records import OverQuota, Problem
from service.jobs.spec.base import CommonSpec
from service.jobs.store import decode, stubs
from service.jobs.store.client import BrokerClient
from service.jobs.store.keyspace import ARTIFACT_BYTES, JOBS_BY, PROJECT_ARTIFACTS
from service.jobs.store.listing import JobFilter
from service.jobs.store.webhooks import notice_fields
from service.jobs.submission.request import joined
from service.jobs.text import folded
from service.jobs.tracing import current_traceparent

_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_RANDOM_CHARACTERS = 11


@dataclass(frozen=True)
class Submission:
    """A spec that its owner submits; ``path`` is where the request's body holds it, ``idem`` the digest of the
    idempotency key, empty without one.
    """

    path: str
    spec: CommonSpec
    owner: str
    project: str
    text: str
    idem: str
    body_hash: str
    launcher: str = LOCAL

    def entry(self) -> dict[str, object]:
        """Return what the script of submission reads of it."""
        return {
            "idem": self.idem,
            "body_hash": self.body_hash,
            "suffix": "".join(secrets.choice(_ALPHABET) for _ in range(_RANDOM_CHARACTERS)),
            "record": self.record(),
            "indexes": _indexes(self),
            "after": _needed(self.spec),
            "weights": _only_for_weights(self.spec),
            "files": uploads_of(self.spec),
        }

    def record(self) -> dict[str, str]:
        """Return the fields of the job's hash that submission knows, all of them strings."""
        spec = self.spec
        ranks = spec.parallel.world_size
        is_local = self.launcher == LOCAL
        return {
            "kind": spec.kind,
            "name": spec.name or spec.kind,
            "labels": json_of(spec.labels),
            "folded": folded(f"{spec.name or spec.kind} {json_of(spec.labels)}"),
            "owner": self.owner,
            "project": self.project,
            "priority": str(spec.priority),
            "retries": str(spec.retries),
            "preemptible": "1" if spec.preemptible else "",
            "timeout_s": "" if spec.timeout_s is None else str(spec.timeout_s),
            "parallel": spec.parallel.model_dump_json(),
            # Of a launcher's jobs it names no device: placement, of whatever version, has none for them.
            "shape": f"{spec.device if is_local else self.launcher}:{ranks}:{min(spec.max_hosts, ranks)}",
            **({} if is_local else {"launcher": self.launcher, "device": spec.device}),
            "after": json_of(_needed(spec)),
            "weights": json_of(_only_for_weights(spec)),
            "indexes": json_of(_indexes(self)),
            "spec": self.text,
            "exports": " ".join(spec.export.chosen()),
            "traceparent": current_traceparent() or "",
            **notice_fields(spec),
        }


def text_of(spec: CommonSpec) -> str:
    return spec.model_dump_json(by_alias=True)


def json_of(value: object) -> str:
    return orjson.dumps(value).decode()


def idempotency_digest(project: str, owner: str, key: str) -> str:
    """Return what an idempotency key is kept under; in the default project as it was before there were others."""
    return hashed(json_of([owner, key] if project == DEFAULT_PROJECT else [project, owner, key]))


def hashed(*texts: str) -> str:
    hashed = hashlib.sha256()
    for text in texts:
        hashed.update(text.encode())
    return hashed.hexdigest()


def _indexes(submission: Submission) -> list[str]:
    spec, project = submission.spec, submission.project
    labels = [index for key, value in spec.labels.items() for index in (f"label:{key}", f"label:{key}={value}")]
    files = [f"file:{project}/{file_id}" for file_id in uploads_of(spec)]
    needs = [f"needs:{job_id}" for job_id in _needed(spec)]
    return [f"kind:{spec.kind}", f"owner:{submission.owner}", *labels, *files, *needs, *project_indexes(project)]


def project_indexes(project: str) -> tuple[str, ...]:
    """Return the indexes of what belongs to a project, and of what its members see."""
    return f"project:{project}", f"visible:{project}"


def uploads_of(spec: CommonSpec) -> list[str]:
    return list(dict.fromkeys(file_id for _, file_id in files_of(spec)))


def _needed(spec: CommonSpec) -> list[str]:
    return list(dict.fromkeys(dependency.job_id for dependency in spec.dependencies()))


def _only_for_weights(spec: CommonSpec) -> list[str]:
    """Return the jobs that need not succeed: the spec takes weights that they have left, and no more."""
    others = {dependency.job_id for dependency in spec.dependencies() if dependency.weights is None}
    return [job_id for job_id in _needed(spec) if job_id not in others]


def _dependency_problem(spec: CommonSpec, place: str, job_id: str, state: str) -> Problem:
    path = next((needed.path for needed in spec.dependencies() if needed.job_id == job_id), "")
    said = f"there is no job {job_id}" if state == "missing" else f"job {job_id} is {state}"
    return Problem(joined(place, path), said, job_id, "a job that has succeeded or still can")


def _upload_problem(spec: CommonSpec, place: str, file_id: str, _: str) -> Problem:
    path = next((path for path, named in files_of(spec) if named == file_id), "")
    return Problem(joined(place, path), f"there is no {file_id}", file_id, "the id that an upload to /v1/files gave")


def _quota_problem(spec: CommonSpec, place: str, quota: str, bound: str) -> Problem:
    project, most = itemgetter("project", "most")(orjson.loads(bound))
    if quota == "highest_priority":
        message = f"project '{project}' may not ask for so high a priority"
        return Problem(joined(place, "priority"), message, spec.priority, f"at most {most:g}, its {quota}")
    if quota == "devices":
        message = f"project '{project}' may not use so many devices at once"
        return Problem(joined(place, "parallel"), message, spec.parallel.world_size, f"at most {most:g}, its {quota}")
    message = f"jobs of project '{project}' need a time limit, and none so long"
    return Problem(joined(place, "timeout_s"), message, spec.timeout_s, f"at most {most:g} s, its {quota}")


LATE_REFUSALS: Mapping[str, Callable[[CommonSpec, str, str, str], Problem]] = MappingProxyType(
    {"dependency": _dependency_problem, "quota": _quota_problem, "upload": _upload_problem}
)
"""By the outcome that the script of submission names: the problem with a spec, where the request's body holds it, the
id of what it needs and the state of that, or the name of the quota that it is over and JSON of the project and what it
allows.
"""


_MOST_NAMED = 3
_MOST_READ = 1000
"""Queued jobs, the newest, by which owners are counted: meanwhile the broker does nothing else."""
_PAGE_BYTES = 2**21


def refuse_over_quota(client: BrokerClient, outcome: str, quota: str, bound: str) -> None:
    """Raise :class:`OverQuota` where a script of submission refused a job for what its project has already."""
    if outcome == "quota" and (describe := _DESCRIPTIONS.get(quota)) is not None:
        known = orjson.loads(bound)
        raise OverQuota(describe(client, known["project"], round(known["most"])))


def _queued_by_owner(client: BrokerClient, project: str, most: int) -> str:
    _, *views = stubs.list_jobs(
        client,
        filters=JobFilter(project=project, states=("queued",)).script_argument,
        text="",
        cursor="",
        limit=_MOST_READ,
        scan=_MOST_READ,
        without="spec",
        page_bytes=_PAGE_BYTES,
    )
    owners = Counter(decode.fields_of(view)["owner"] for view in views).most_common(_MOST_NAMED)
    who = ", ".join(f"{owner} has {jobs}" for owner, jobs in owners)
    count = client.call("ZCARD", JOBS_BY(f"state:queued:{project}"))
    return f"project '{project}' has {count} of {most} queued jobs{f': {who}' if who else ''}"


def _artifacts_by_job(client: BrokerClient, project: str, most: int) -> str:
    used = int(client.call("HGET", ARTIFACT_BYTES(), project) or 0)
    flat = client.call("ZRANGE", PROJECT_ARTIFACTS(project), 0, _MOST_NAMED - 1, "REV", "WITHSCORES")
    largest = ", ".join(f"{job} has {round(float(held))}" for job, held in zip(flat[::2], flat[1::2], strict=True))
    said = f"project '{project}' has {used} of {most} bytes of artifacts"
    return f"{said}; the largest: {largest}; to delete these jobs frees theirs" if largest else said


_DESCRIPTIONS: Mapping[str, Callable[[BrokerClient, str, int], str]] = MappingProxyType(
    {"queued_jobs": _queued_by_owner, "artifact_bytes": _artifacts_by_job}
)
