"""Describes what was fine when a job was checked and no longer is when it was to be written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from types import MappingProxyType

import orjson

from service.jobs.checks.files import files_of
from service.jobs.records import Problem
from service.jobs.spec.base import CommonSpec
from service.jobs.submission.request import joined


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
