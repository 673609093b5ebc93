"""Checks training jobs, and whether one can continue another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from math import gcd

from pydantic import ValidationError

from service.jobs.checks.dependencies import check_archive, resolve
from service.jobs.checks.fit import check_data, check_export, check_float8, check_mesh, check_package, check_pipeline
from service.jobs.checks.gate import check_gate
from service.jobs.checks.samples import check_samples
from service.jobs.plugins import Better, CheckContext, JobKind, ModelConfig, Tokens
from service.jobs.records import Job, Problem
from service.jobs.spec.arithmetic import FLOAT8_MULTIPLE
from service.jobs.spec.common import MOST_FOLLOWED, TERMINAL, StoppingRule
from service.jobs.spec.data import DataSpec
from service.jobs.spec.families import TransformerConfig
from service.jobs.spec.model import FromJob
from service.jobs.spec.train import TrainSpec


def check(spec: TrainSpec, context: CheckContext) -> Iterator[Problem]:
    """Yield every reason why this training job could never run."""
    config = resolve(spec.model, context)
    yield from check_gate(spec, config, context)
    yield from _check_resume(spec, config, context)
    if spec.program is not None:
        yield from (Problem(*reason) for reason in spec.program.check(spec))
        yield from _check_evaluations(spec)
    elif spec.data is not None:
        yield from _check_model(spec, spec.data, config, context)
        yield from check_samples(spec.data, "data", context.path_of)


def _check_model(
    spec: TrainSpec, data: DataSpec, config: ModelConfig | None, context: CheckContext
) -> Iterator[Problem]:
    """Yield why the job's model could not be trained on this data; ``config`` is the model's, where it is known."""
    yield from check_archive(spec.model, context)
    if config is not None:
        yield from check_package(config, spec.model, context)
        yield from check_mesh(spec.parallel, spec.stages, spec.model, config)
        yield from check_export(spec.export, config)
        yield from check_data(data, "data", spec.model, config)
        yield from _check_sequence(spec, data, config)
        if names := config.parameter_names:
            yield from (Problem(*reason) for reason in spec.optimizer.check(names))
    yield from (Problem(*reason) for reason in spec.objective.check(spec, data.gives))
    yield from (Problem(*reason) for reason in spec.schedule.check(spec))
    yield from _check_evaluations(spec)
    yield from _check_batch(spec)
    yield from _check_float8_rows(spec, data, config)
    yield from check_pipeline(spec, spec.micro_batches)
    yield from check_float8(spec, config, context)


def check_stop(spec: TrainSpec, rule: StoppingRule, jobs: int) -> Iterator[Problem]:
    """Yield why the rule of a sweep of so many jobs could not follow the evaluations of this one."""
    if spec.program is not None or spec.data is None:
        yield Problem("sweep.stop", "only ranks know what a program evaluates", rule.rule, "null, or jobs with a model")
        return
    yield from _check_metric(spec, "sweep.stop.metric", "sweep.stop.mode", rule.metric, rule.mode)
    if rule.first >= spec.steps:
        message = f"the jobs end at step {spec.steps}"
        yield Problem("sweep.stop.first", message, rule.first, f"a step below {spec.steps}")
    every = spec.evaluate.every
    if every is None or every > rule.first:
        message = "the sweep's rule follows evaluations, and there is none by the first step at which it may stop a job"
        yield Problem("evaluate.every", message, every, f"a number of steps up to {rule.first}")
    elif (count := spec.steps // every * jobs) > MOST_FOLLOWED:
        message = f"the sweep's rule would follow {count} evaluations of {jobs} jobs, and it follows {MOST_FOLLOWED}"
        yield Problem("evaluate.every", message, every, f"at least {math.ceil(spec.steps * jobs / MOST_FOLLOWED)}")


TRAIN = JobKind(
    TrainSpec,
    "service.training.job:run",
    check,
    page="api.dashboard:static/kinds/train.js",
    preloads=("service.training.job", "torch._dynamo"),
    check_stop=check_stop,
)


def _check_evaluations(spec: TrainSpec) -> Iterator[Problem]:
    """Yield why the training cannot follow the evaluations that its schedule or its end asks for."""
    asked = [("schedule.metric", "schedule.mode", metric, mode) for metric, mode in spec.schedule.follows.items()]
    for metric, mode in (spec.stop.follows if spec.stop else {}).items():
        asked.append((f"stop.when.{metric}", f"stop.when.{metric}.mode", metric, mode))
    if asked and (spec.evaluate.every is None or spec.evaluate.every >= spec.steps):
        message = f"{asked[0][0].partition('.')[0]} follows evaluations, and there is none before the last step"
        yield Problem("evaluate.every", message, spec.evaluate.every, f"a number of steps below {spec.steps}")
    for each in asked:
        yield from _check_metric(spec, *each)


def _check_metric(spec: TrainSpec, path: str, mode_path: str, metric: str, mode: Better) -> Iterator[Problem]:
    # Only ranks know the metrics of a program.
    known = spec.objective.better(spec.data.gives) if spec.data is not None else {}
    if known and metric not in known:
        yield Problem(path, "the objective evaluates no such metric", metric, f"one of {', '.join(known)}")
    elif known and mode != known[metric]:
        yield Problem(mode_path, f"the better {metric} is the other one", mode, known[metric])


def _check_sequence(spec: TrainSpec, data: DataSpec, config: ModelConfig) -> Iterator[Problem]:
    """Yield why stages could not send a transformer's residual stream: each rank has a part of the tokens."""
    gives, tp = data.gives, spec.parallel.tp
    if isinstance(config, TransformerConfig) and isinstance(gives, Tokens) and spec.stages > 1 and gives.sequence % tp:
        message = f"a pipeline sends parts of a sequence: {gives.sequence} does not divide by tp={tp}"
        yield Problem("data.sequence", message, gives.sequence, f"a multiple of {tp}")


def _check_batch(spec: TrainSpec) -> Iterator[Problem]:
    """Yield why a global batch is not ``dp × micro-batches × micro`` in whole numbers."""
    dp, batch, micro = spec.parallel.dp, spec.batch.global_, spec.batch.micro
    if batch % dp:
        replicas = f"dp_replicate={spec.parallel.dp_replicate} × dp_shard={spec.parallel.dp_shard} = {dp}"
        yield Problem("batch.global", f"{batch} samples do not divide by {replicas}", batch, f"a multiple of {dp}")
        return
    share = batch // dp
    arithmetic = f"global={batch} / dp={dp} = {share} samples per data-parallel rank"
    asked = spec.pipeline.micro_batches if spec.parallel.pp > 1 else None
    if micro is not None and share % micro:
        message = f"{arithmetic} do not divide by micro={micro}"
        yield Problem("batch.micro", message, micro, f"a divisor of {share}")
    elif micro is not None and asked is not None and micro * asked != share:
        message = f"{arithmetic}, but micro={micro} × micro_batches={asked} = {micro * asked}"
        yield Problem("pipeline.micro_batches", message, asked, f"{share // micro}, or absent")
    elif share % spec.micro_batches:
        message = f"{arithmetic} do not divide by {spec.micro_batches} micro-batches"
        expected = f"a multiple of {dp * spec.micro_batches}, or another pipeline.micro_batches"
        yield Problem("batch.global", message, batch, expected)


def _check_float8_rows(spec: TrainSpec, data: DataSpec, config: ModelConfig | None) -> Iterator[Problem]:
    """Yield why a forward's tokens, or samples of an mlp, are no multiple that float8 products have. What else a family
    makes of its samples, only its ranks know.
    """
    length = data.gives.sequence if isinstance(data.gives, Tokens) else 1
    is_known = isinstance(data.gives, Tokens) or (config is not None and config.family == "mlp")
    rows = spec.forward_samples * length
    if not spec.precision.float8 or not is_known or not rows % FLOAT8_MULTIPLE:
        return
    samples = FLOAT8_MULTIPLE // gcd(length, FLOAT8_MULTIPLE)
    message = f"precision.float8 needs a multiple of {FLOAT8_MULTIPLE} rows in a forward, and this has {rows}"
    if spec.batch.micro is not None:
        yield Problem("batch.micro", message, spec.batch.micro, f"a multiple of {samples}")
    else:
        whole = samples * spec.parallel.dp * spec.micro_batches
        yield Problem("batch.global", message, spec.batch.global_, f"a multiple of {whole}")


def _check_resume(spec: TrainSpec, config: ModelConfig | None, context: CheckContext) -> Iterator[Problem]:
    """Yield why the job cannot continue the one that it resumes; ``config`` is that of its own model."""
    job = None if spec.resume is None else context.lookup(spec.resume.job)
    if job is None or job.kind != "train":
        return
    try:
        first = TrainSpec.model_validate(job.spec)
    except ValidationError:
        return  # the check of dependencies reports problems of the job
    theirs = resolve(FromJob(job=job.id), context)
    if config is not None and theirs is not None and config != theirs:
        got = {name: value for name, value in config if value != getattr(theirs, name, None)}
        yield Problem("model", f"job {job.id} trains another model", str(got), f"{{job: {job.id}}}, or its model")
    name, first_name = (each and each.name for each in (spec.program, first.program))
    if name is not None and name != first_name:
        yield Problem("program.name", f"job {job.id} trains {first_name or 'a model'}", name, first_name or "a model")
    yield from _check_order(spec, first, job)
    if spec.program is None:
        yield from _check_state(spec, first, job)
    yield from _check_steps(spec, first, job, context)


def _check_order(spec: TrainSpec, first: TrainSpec, job: Job) -> Iterator[Problem]:
    """Yield the changes that would reorder the samples of the resumed job."""
    if spec.data is not None and spec.data != first.data:
        got = spec.data.model_dump(mode="json", by_alias=True)
        yield Problem("data", f"job {job.id} trains on other data", str(got), f"its data, or model: {{job: {job.id}}}")
    if spec.seed != first.seed:
        yield Problem("seed", f"job {job.id} draws its batches with another seed", spec.seed, str(first.seed))
    if spec.batch.global_ != first.batch.global_:
        message = f"job {job.id} counts its place in the data in batches of another size"
        yield Problem("batch.global", message, spec.batch.global_, str(first.batch.global_))


def _check_state(spec: TrainSpec, first: TrainSpec, job: Job) -> Iterator[Problem]:
    """Yield the changes with which the resumed job's optimizer and schedule would not go on as they were."""
    start = f"or start from its weights by model: {{job: {job.id}}}"
    ours, theirs = spec.optimizer.keeps(), first.optimizer.keeps()
    if spec.optimizer.name != first.optimizer.name:
        message = f"job {job.id} keeps the state of {first.optimizer.name}"
        yield Problem("optimizer.name", message, spec.optimizer.name, f"{first.optimizer.name}, {start}")
    else:
        for field in sorted(name for name in ours if ours[name] != theirs[name]):
            message = f"job {job.id} keeps other state of its parameters: its optimizer.{field} differs"
            yield Problem(f"optimizer.{field}", message, str(ours[field]), f"{theirs[field]}, {start}")
    if spec.schedule.decay != first.schedule.decay:
        message = f"job {job.id} follows the schedule {first.schedule.decay}"
        yield Problem("schedule.decay", message, spec.schedule.decay, f"{first.schedule.decay}, {start}")


def _check_steps(spec: TrainSpec, first: TrainSpec, job: Job, context: CheckContext) -> Iterator[Problem]:
    assert spec.resume is not None
    if spec.resume.step == "latest":
        left = context.checkpoints_of(job.id) if job.state in TERMINAL else (first.steps,)
        begun = max(left, default=0)
    else:
        begun = spec.resume.step
    if spec.steps <= begun:
        yield Problem("steps", f"job {job.id} is at step {begun} already", spec.steps, f"more than {begun}")
