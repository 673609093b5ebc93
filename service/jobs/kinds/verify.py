"""Checks verification jobs at submission."""

from __future__ import annotations

from collections.abc import Iterator

from service.jobs.checks.dependencies import check_archive, resolve
from service.jobs.checks.fit import check_mesh, check_package, check_property
from service.jobs.checks.queries import check_queries
from service.jobs.checks.samples import check_samples
from service.jobs.plugins import CheckContext, JobKind
from service.jobs.records import Problem
from service.jobs.spec.verify import RobustnessProperty, VerifySpec


def check(spec: VerifySpec, context: CheckContext) -> Iterator[Problem]:
    """Yield every reason why this verification job could never run."""
    config = resolve(spec.model, context)
    yield from check_archive(spec.model, context)
    if config is not None:
        yield from check_package(config, spec.model, context)
        yield from check_mesh(spec.parallel, spec.parallel.pp, spec.model, config)
        yield from check_property(spec, config)
    yield from check_queries(spec, config, context.path_of)
    if isinstance(spec.property, RobustnessProperty):
        asked = spec.property.robustness
        yield from check_samples(asked.data, "property.robustness.data", context.path_of, count=asked.count)


VERIFY = JobKind(
    VerifySpec,
    "service.verification.job:run",
    check,
    page="api.dashboard:static/kinds/verify.js",
    preloads=(
        "service.verification.job",
        "service.verification.load.trained",
        "service.bounds.onnx.stored",
        "service.bounds.decompositions.table",
        "service.bounds.dtensors",
        "service.bounds.exported",
        "service.bounds.functional",
        "service.verification.first_trace",
        "service.parallel.checkpoint",
        "scipy.optimize",
    ),
)
