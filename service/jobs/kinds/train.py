"""Training jobs, as the service knows them."""

from __future__ import annotations

from collections.abc import Iterator

from service.jobs.checks.batch import check_batch
from service.jobs.checks.dependencies import check_archive, resolve
from service.jobs.checks.fit import check_data, check_export
from service.jobs.checks.fleet import check_float8
from service.jobs.checks.gate import check_gate
from service.jobs.checks.mesh import check_mesh
from service.jobs.checks.pipeline import check_pipeline
from service.jobs.plugins import CheckContext, JobKind
from service.jobs.records import Problem
from service.jobs.spec.train import TrainSpec


def check(spec: TrainSpec, context: CheckContext) -> Iterator[Problem]:
    """Yield every reason why this training job could never run."""
    config = resolve(spec.model, context)
    yield from check_archive(spec.model, context)
    yield from check_gate(spec, config, context)
    if config is not None:
        yield from check_mesh(spec.parallel, spec.stages, spec.model, config)
        yield from check_export(spec.export, config)
        yield from check_data(spec.data, "data", spec.model, config)
    yield from (Problem(*reason) for reason in spec.objective.check(spec, spec.data.gives))
    yield from check_batch(spec)
    yield from check_pipeline(spec, spec.micro_batches)
    yield from check_float8(spec, context)


TRAIN = JobKind(TrainSpec, "service.training.job:run", check, page="api.dashboard:static/kinds/train.js")
