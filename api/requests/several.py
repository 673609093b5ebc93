"""Reads the jobs of a sweep or a chain from its spec, and reports their problems in terms of that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import ValidationError

from api.requests import sweeps
from api.requests.problems import FieldError, from_refusals, invalid
from service.jobs.kinds.chain import ChainSpec
from service.jobs.plugins import CommonSpec
from service.jobs.records import Job, Problem
from service.jobs.store import Store, Submission
from service.jobs.submission import chains
from service.jobs.submission.request import CheckRequest


class Several(Protocol):
    """The jobs that a spec stands for."""

    @property
    def count(self) -> int:
        """Return their number."""

    def request(self, store: Store, project: str) -> CheckRequest:
        """Return what their check needs."""

    def refusals(self, problems: Iterable[Problem]) -> list[FieldError]:
        """Return the answer of the check with the paths of the submitted spec."""

    def accept(self, store: Store, parent: Submission) -> tuple[Job, bool]:
        """Accept them with their parent, all or none; return that, and whether it is new."""


def several_of(spec: CommonSpec) -> Several:
    """Return the jobs that a spec stands for. Raises a 422 for values that none could have."""
    if isinstance(spec, ChainSpec):
        return _Chain(chain_of(spec))
    return _Sweep(spec, sweeps.children_of(spec))


@dataclass(frozen=True)
class _Sweep:
    spec: CommonSpec
    children: list[sweeps.Child]

    @property
    def count(self) -> int:
        return len(self.children)

    def request(self, store: Store, project: str) -> CheckRequest:
        return store.jobs.check_specs({str(index): spec for index, (_, spec) in enumerate(self.children)}, {project})

    def refusals(self, problems: Iterable[Problem]) -> list[FieldError]:
        return sweeps.refusals(self.spec, self.children, problems)

    def accept(self, store: Store, parent: Submission) -> tuple[Job, bool]:
        return store.sweeps.accept(parent, self.children)


@dataclass(frozen=True)
class _Chain:
    jobs: Sequence[chains.ChainedJob]

    @property
    def count(self) -> int:
        return len(self.jobs)

    def request(self, store: Store, project: str) -> CheckRequest:
        planned = {each.stand_in: each.planned() for each in self.jobs}
        return store.jobs.check_specs({f"jobs.{each.name}": each.spec for each in self.jobs}, {project}, planned)

    def refusals(self, problems: Iterable[Problem]) -> list[FieldError]:
        return [self._named(error) for error in from_refusals(problems)]

    def _named(self, error: FieldError) -> FieldError:
        told = {name: chains.by_names(value, self.jobs) for name, value in error if name != "path"}
        return error.model_copy(update=told)

    def accept(self, store: Store, parent: Submission) -> tuple[Job, bool]:
        return store.sweeps.accept_chain(parent, self.jobs)


def chain_of(spec: ChainSpec) -> list[chains.ChainedJob]:
    """Return the jobs of a chain, each behind those that it needs. Raises a 422 that names every wrong field."""
    jobs, errors = [], []
    for name in spec.jobs:
        try:
            jobs.append(chains.chained(spec, name))
        except ValidationError as error:
            errors += [_below(f"jobs.{name}", found) for found in sweeps.from_spec(error)]
    if not errors:
        errors = [_below("jobs", found) for found in from_refusals(chains.problems(jobs))]
    if errors:
        raise invalid(errors)
    return chains.ordered(jobs)


def _below(path: str, error: FieldError) -> FieldError:
    return error.model_copy(update={"path": f"{path}.{error.path}".rstrip(".")})
