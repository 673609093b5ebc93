"""Specs to be checked, the jobs that they name, and what the check says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from service.jobs.checks.dependencies import related
from service.jobs.kinds.registry import spec_adapter
from service.jobs.plugins import CheckContext
from service.jobs.records import Job
from service.jobs.spec.common import JobState
from service.jobs.submission.check import check

MLP = {"family": "mlp", "in_features": 64, "hidden": [8, 12], "out_features": 10}
TRANSFORMER = {"family": "transformer", "vocab_size": 256, "dim": 16, "heads": 4, "layers": 2, "max_sequence": 32}
DIGITS = {"source": "digits"}
TOKENS = {"source": "tokens", "sequence": 16}
ROBUSTNESS = {"robustness": {"data": DIGITS, "eps": 0.1}}
CONVNET = {"family": "convnet", "height": 8, "width": 8, "channels": [4, 8], "hidden": [12], "out_features": 10}
DEEP = {**MLP, "hidden": [8] * 8}
CERTIFIED = {"name": "certified", "eps": 0.1}
FILE = "file_" + "0a" * 32
A, B, C = ("job_" + letter * 20 for letter in "abc")


def job(job_id: str, kind: Any = "train", state: JobState = "succeeded", model: Any = MLP, **fields: Any) -> Job:
    return Job(
        id=job_id,
        kind=kind,
        name="",
        labels={},
        owner="ada",
        state=state,
        attempt=1,
        priority=0,
        created_at=datetime.now(UTC),
        spec={"kind": kind, "model": model, **fields},
    )


def spec(kind: str, **fields: Any) -> Any:
    base: dict[str, dict[str, Any]] = {
        "train": {"model": MLP, "data": DIGITS, "steps": 1},
        "verify": {"model": MLP, "property": ROBUSTNESS},
        "compile": {"model": MLP},
    }
    return spec_adapter.validate_python({"kind": kind, **base[kind], **fields})


def fleet_context(fleet: Mapping[str, int] | None, drained: Mapping[str, int] | None = None) -> CheckContext:
    """Return what is known of hosts with such devices, and of drained hosts with further ones."""
    devices = None if fleet is None else dict(Counter(fleet) + Counter(drained or {}))
    return CheckContext(devices, auto_pool="cuda" if fleet and fleet.get("cuda") else "cpu")


def found(
    given_spec: Any,
    *jobs: Job,
    fleet: Mapping[str, int] | None = None,
    drained: Mapping[str, int] | None = None,
) -> list[tuple[str, Any, str]]:
    """Of all jobs, and so of those alone that :func:`related` finds."""
    known = {each.id: each for each in jobs}
    context = fleet_context(fleet, drained)
    problems = check(given_spec, replace(context, lookup=known.get))
    assert check(given_spec, replace(context, lookup=related([given_spec], known.get, known.get).get)) == problems
    return [(problem.path, problem.got, problem.expected) for problem in problems]


def message(given_spec: Any, *jobs: Job, fleet: Mapping[str, int] | None = None) -> str:
    known = {each.id: each for each in jobs}
    (problem,) = check(given_spec, replace(fleet_context(fleet), lookup=known.get))
    return problem.message
