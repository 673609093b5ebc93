"""Describes the quota that a refused job would exceed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType

import orjson

from service.jobs.records import OverQuota
from service.jobs.store import decode, stubs
from service.jobs.store.client import BrokerClient
from service.jobs.store.keyspace import ARTIFACT_BYTES, JOBS_BY, PROJECT_ARTIFACTS
from service.jobs.store.listing import JobFilter

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
