"""Expands submitted sweeps, and reports a job's problems in terms of the user's sweep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pydantic import ValidationError

from api.requests.error_paths import Locator
from api.requests.problems import FieldError, echo, from_refusals, from_validation, invalid
from service.jobs.kinds.registry import KINDS, spec_adapter
from service.jobs.plugins import CommonSpec
from service.jobs.records import Problem
from service.jobs.submission.sweeps import NoPlace, Parameters, SweptSpec, expand

Child = tuple[Parameters, CommonSpec]
_LOCATOR = Locator(spec_adapter.core_schema)


def from_spec(error: ValidationError) -> list[FieldError]:
    """Return what is wrong with a spec that is not itself the body of a request."""
    return from_validation([{**each, "loc": ("body", *each["loc"])} for each in error.errors()], _LOCATOR)


def children_of(spec: CommonSpec) -> list[Child]:
    """Return the jobs of a sweep. Raises a 422 that names every value and path that no job could have."""
    children: list[Child] = []
    errors: dict[tuple[str, str], FieldError] = {}
    for swept in _expand_sweep(spec):
        try:
            children.append((swept.parameters, spec_adapter.validate_python(swept.body)))
        except ValidationError as error:
            for found in from_spec(error):
                blamed = found.model_copy(update={"path": _blame(spec, swept.parameters, found.path)})
                errors.setdefault((blamed.path, str(blamed.got)), blamed)
    if errors:
        raise invalid(list(errors.values()))
    _check_stop(spec, children)
    return children


def _check_stop(spec: CommonSpec, children: list[Child]) -> None:
    """Raise a 422 that names why the sweep's rule could not follow its jobs."""
    assert spec.sweep is not None
    if (rule := spec.sweep.stop) is None:
        return
    check = KINDS.declaration(spec.kind).check_stop
    if check is None:
        able = [name for name in KINDS.provided if KINDS.declaration(name).check_stop is not None]
        message = f"a job of kind {spec.kind} reports no metrics by steps, which a rule could follow"
        expected = f"null, or a job of kind {' or '.join(able)}"
        raise invalid([FieldError(path="sweep.stop", message=message, got=rule.rule, expected=expected)])
    problems = [
        replace(problem, path=f"{index}.{problem.path}")
        for index, (_, child) in enumerate(children)
        for problem in check(child, rule, len(children))
    ]
    if problems:
        raise invalid(refusals(spec, children, problems))


def _expand_sweep(spec: CommonSpec) -> Iterator[SweptSpec]:
    try:
        yield from expand(spec)
    except NoPlace as error:
        path = _blame(spec, {error.path: None}, error.path)
        raise invalid(
            [FieldError(path=path, message=str(error), got=error.path, expected="the path of a field of the spec")]
        ) from error


def refusals(spec: CommonSpec, children: list[Child], problems: Iterable[Problem]) -> list[FieldError]:
    """Return why jobs of a sweep are refused, each reason once. Each problem's path begins with the index of
    its job.
    """
    errors: dict[tuple[str, str], FieldError] = {}
    for problem in problems:
        index, _, path = problem.path.partition(".")
        parameters = children[int(index)][0]
        (error,) = from_refusals([problem])
        where = ", ".join(f"{name}={echo(value)}" for name, value in parameters.items())
        errors.setdefault(
            (path, error.message),
            error.model_copy(
                update={"path": _blame(spec, parameters, path), "message": f"with {where}: {error.message}"}
            ),
        )
    return list(errors.values())


def _blame(spec: CommonSpec, parameters: Parameters, path: str) -> str:
    """Return where the user gave the field at ``path``: in the sweep, if it is a swept field or within one."""
    assert spec.sweep is not None
    places = spec.sweep.places()
    for swept in parameters:
        if path == swept or path.startswith(f"{swept}.") or swept.startswith(f"{path}."):
            return f"sweep.{places[swept]}"
    return path
