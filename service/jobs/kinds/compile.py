"""Checks compile jobs at submission."""

from __future__ import annotations

from collections.abc import Iterator

from service.jobs.checks.dependencies import check_archive, check_exported, resolve
from service.jobs.checks.fit import check_data, check_float8, check_mesh, check_package, check_pipeline
from service.jobs.checks.samples import check_samples
from service.jobs.plugins import CheckContext, JobKind
from service.jobs.records import Problem
from service.jobs.spec.compile import CompileSpec


def check(spec: CompileSpec, context: CheckContext) -> Iterator[Problem]:
    """Yield every reason why this compile check could never run."""
    config = resolve(spec.model, context)
    yield from check_archive(spec.model, context)
    if config is not None:
        yield from check_package(config, spec.model, context)
        yield from check_mesh(spec.parallel, spec.stages, spec.model, config)
        if spec.data is not None:
            yield from check_data(spec.data, "data", spec.model, config)
    if spec.model is not None:
        yield from check_pipeline(spec, spec.forwards)
        yield from check_float8(spec, config, context)
    if not spec.objective.compiles:
        message = "it is computed without compilation"
        yield Problem("objective.name", message, spec.objective.name, "cross_entropy, or another one")
    if spec.data is not None:
        yield from check_samples(spec.data, "data", context.path_of)
    if spec.program is not None:
        yield from (Problem(*reason) for reason in spec.program.check(spec))
    yield from check_exported(spec, context)


COMPILE = JobKind(
    CompileSpec,
    "service.compilation.entry:run",
    check,
    page="api.dashboard:static/kinds/compile.js",
    report="report.json",
)
