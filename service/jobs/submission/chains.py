"""Resolves the names of a chain: from specs that name each other to jobs in an order in which each can wait for those
before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from graphlib import CycleError, TopologicalSorter
from typing import Any

from service.jobs.kinds.chain import ChainSpec
from service.jobs.kinds.registry import spec_adapter
from service.jobs.plugins import CommonSpec
from service.jobs.records import Job, Problem
from service.jobs.spec.common import IdsByName

_STAND_IN = "job_zzzzzzzzz"
"""How ids begin that stand for jobs of a chain until it is accepted: no time of submission reads so."""
_LONGEST_NAME = 200


@dataclass(frozen=True)
class ChainedJob:
    """A job of a chain. Its spec names others by what stands in for their ids, as ``stand_in`` does for its own."""

    name: str
    stand_in: str
    spec: CommonSpec

    @property
    def names(self) -> list[str]:
        """Return what stands in for the jobs of the chain that it needs."""
        return list(dict.fromkeys(each.job_id for each in self.spec.dependencies() if is_stand_in(each.job_id)))

    def planned(self) -> Job:
        """Return the job as the checks of others see it, before there is one."""
        spec = self.spec
        return Job(
            id=self.stand_in,
            kind=spec.kind,
            name=spec.name,
            labels=spec.labels,
            owner="",
            state="queued",
            attempt=0,
            priority=spec.priority,
            created_at=datetime.now(UTC),
            spec=spec.model_dump(mode="json", by_alias=True),
        )


def is_stand_in(job_id: str) -> bool:
    """Return whether an id stands for a job of a chain that is not accepted yet."""
    return job_id.startswith(_STAND_IN)


def stand_ins(chain: ChainSpec) -> dict[str, str]:
    """Return what stands for the id of each job, by its name."""
    return {name: f"{_STAND_IN}{index:011}" for index, name in enumerate(chain.jobs)}


def chained(chain: ChainSpec, name: str) -> ChainedJob:
    """Return a job of the chain. Raises ``ValidationError``."""
    ids = stand_ins(chain)
    spec: CommonSpec = spec_adapter.validate_python(chain.jobs[name], context=IdsByName(ids))
    if not spec.name:
        spec = spec.model_copy(update={"name": (f"{chain.name}: {name}" if chain.name else name)[:_LONGEST_NAME]})
    return ChainedJob(name, ids[name], spec)


def problems(jobs: Iterable[ChainedJob]) -> list[Problem]:
    """Return why the jobs are no chain, with the paths of fields below ``jobs``: one stands for others, or some wait
    for each other.
    """
    jobs = list(jobs)
    found = [
        Problem(
            f"{each.name}.{'sweep' if each.spec.sweep else 'kind'}", "it stands for several jobs", each.name, "one job"
        )
        for each in jobs
        if each.spec.stands_for_others
    ]
    try:
        ordered(jobs)
    except CycleError as error:
        names = {each.stand_in: each.name for each in jobs}
        circle = [names[stand_in] for stand_in in error.args[1]][::-1]
        first = next(each for each in jobs if each.name == circle[0])
        path = next(each.path for each in first.spec.dependencies() if names.get(each.job_id) == circle[1])
        told = " needs ".join(circle)
        found.append(Problem(f"{circle[0]}.{path}", f"none of them could begin: {told}", circle[1], "no circle"))
    return found


def ordered(jobs: Iterable[ChainedJob]) -> list[ChainedJob]:
    """Return the jobs, each behind those that it needs. Raises ``graphlib.CycleError``."""
    by_id: Mapping[str, ChainedJob] = {each.stand_in: each for each in jobs}
    sorter: TopologicalSorter[str] = TopologicalSorter({each.stand_in: each.names for each in by_id.values()})
    return [by_id[each] for each in sorter.static_order()]


def by_names(value: Any, jobs: Iterable[ChainedJob]) -> Any:
    """Return a text with the names of the jobs in place of what stands in for their ids; anything else as it is."""
    if isinstance(value, str):
        for each in jobs:
            value = value.replace(each.stand_in, each.name)
    return value
