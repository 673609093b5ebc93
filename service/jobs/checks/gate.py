"""Checks whether a training job's gate covers what the job will compile, as far as specs show it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from service.jobs.checks.dependencies import resolve
from service.jobs.plugins import CheckContext, ModelConfig, ProgramConfig
from service.jobs.records import Problem
from service.jobs.spec.arithmetic import is_sharded
from service.jobs.spec.compile import CompileSpec
from service.jobs.spec.run import RunSpec
from service.jobs.spec.train import TrainSpec

GATE = "compile.gate"


def check_gate(spec: TrainSpec | RunSpec, config: ModelConfig | None, context: CheckContext) -> Iterator[Problem]:
    """Yield the parts of the job that the gate's job did not check; ``config`` is the job's own model.

    Ranks compare facts that only they know, such as the device.
    """
    if spec.compile.gate is None or not _compiled_phases(spec):
        return
    checked = _spec_of(spec.compile.gate, context)
    if checked is None:  # the check of dependencies reports this, unless it is unknown
        return
    ours, theirs = (_described(each) for each in (spec.program, checked.program))
    if (ours is None) != (theirs is None):
        it, wanted = ("a program from a package", "model") if ours is None else ("a model", "program")
        yield Problem(GATE, f"it checks {it}", spec.compile.gate, f"a compile job about this {wanted}")
        return
    if isinstance(spec, TrainSpec):
        yield from _objectives(spec, checked)
    yield from _phases(spec, checked)
    yield from _differences(spec, checked)
    if ours is not None and theirs is not None:
        yield from _programs(ours, theirs)
    elif isinstance(spec, TrainSpec):
        yield from _samples(spec, checked)
        yield from _models(spec, config, resolve(checked.model, context))


def _described(program: ProgramConfig | None) -> dict[str, Any] | None:
    return None if program is None else program.model_dump(mode="json")


def _objectives(spec: TrainSpec, checked: CompileSpec) -> Iterator[Problem]:
    if spec.objective != checked.objective:
        message = f"the gate's job checks the model under {checked.objective.name}"
        if spec.objective.name == checked.objective.name:
            message += " of other numbers"
        expected = "the objective of the gate's job, or another compile.gate"
        yield Problem("objective", message, str(spec.objective.model_dump(mode="json")), expected)


def _programs(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[Problem]:
    for name in sorted(ours.keys() | theirs.keys()):
        if (here := ours.get(name)) != (there := theirs.get(name)):
            message = f"the gate's job ran with {there}, and this one has {here}"
            yield Problem(f"program.{name}", message, here, f"{there}, or another compile.gate")


def _compiled_phases(spec: TrainSpec | RunSpec) -> list[str]:
    return [phase for phase in ("train", "inference") if getattr(spec.compile, phase)]


def _spec_of(job_id: str, context: CheckContext) -> CompileSpec | None:
    job = context.lookup(job_id)
    if job is None or job.kind != "compile":
        return None
    try:
        return CompileSpec.model_validate(job.spec)
    except ValidationError:  # for example because its package was removed
        return None


def _phases(spec: TrainSpec | RunSpec, checked: CompileSpec) -> Iterator[Problem]:
    for phase in _compiled_phases(spec):
        if phase not in checked.phases:
            message = f"the gate's job checks {' and '.join(checked.phases)} only"
            yield Problem(f"compile.{phase}", message, True, f"false, or a compile job with the phase {phase}")
    if checked.modes == ("eager",):
        yield Problem(GATE, "it climbs no higher than eager, which compiles nothing", spec.compile.gate, "more modes")


def _differences(spec: TrainSpec | RunSpec, checked: CompileSpec) -> Iterator[Problem]:
    ours, theirs = _known(spec), _known(checked)
    for path in ours.keys() & theirs.keys():
        if ours[path] != theirs[path]:
            message = f"the gate's job ran with {theirs[path]}, and this one has {ours[path]}"
            yield Problem(path, message, ours[path], f"{theirs[path]}, or another compile.gate")
    stages = spec.parallel.pp
    if spec.program is None and checked.parallel.pp not in {1, stages}:
        message = f"the gate's job ran with {checked.parallel.pp}"
        yield Problem("parallel.pp", message, stages, f"{checked.parallel.pp}, or another compile.gate")


def _known(spec: TrainSpec | RunSpec | CompileSpec) -> dict[str, str | int | bool]:
    """Return the facts that two jobs must share if both have them. A whole model may stand for its stages, a program
    not.
    """
    dimensions = ("dp_replicate", "dp_shard", "tp")
    known: dict[str, str | int | bool] = {f"parallel.{name}": getattr(spec.parallel, name) for name in dimensions}
    if isinstance(spec, RunSpec) or spec.program is not None:
        return known | {"parallel.pp": spec.parallel.pp}
    known |= {f"precision.{name}": value for name, value in spec.precision.model_dump().items()}
    known["activation_checkpoint"] = spec.activation_checkpoint
    if is_sharded(spec.parallel, spec.precision):
        known |= {f"sharding.{name}": value for name, value in spec.resolved_sharding.model_dump().items()}
    if spec.parallel.pp > 1:
        known["pipeline.schedule"] = spec.pipeline.schedule
        known["pipeline.virtual_stages"] = spec.pipeline.stages_per_rank
    return known


def _samples(spec: TrainSpec, checked: CompileSpec) -> Iterator[Problem]:
    """Compare the samples of a forward. Another mesh, and a batch that does not divide, are problems of their own."""
    samples, ranks, micro = spec.forward_samples, spec.parallel.dp, spec.batch.micro
    divides = samples * spec.micro_batches * ranks == spec.batch.global_ and micro in (None, samples)
    if samples in checked.shapes or not divides or ranks != checked.parallel.dp:
        return
    seen = " or ".join(map(str, checked.shapes))
    message = f"a forward takes {samples} of its samples, and the gate's job checked forwards of {seen}"
    path, got = ("batch.global", spec.batch.global_) if micro is None else ("batch.micro", micro)
    yield Problem(path, message, got, f"forwards of {seen}, or a compile job with shapes of [{samples}]")


def _models(spec: TrainSpec, ours: ModelConfig | None, theirs: ModelConfig | None) -> Iterator[Problem]:
    if ours is None or theirs is None or ours == theirs:
        return
    here, there = ours.model_dump(mode="json"), theirs.model_dump(mode="json")
    name = next(name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name))
    path = f"model.{name}" if isinstance(spec.model, ModelConfig) and name in here else GATE
    message = f"the gate's job checks a model with {name}={there.get(name)!r}, and this one has {here.get(name)!r}"
    got = here[name] if path != GATE else spec.compile.gate
    yield Problem(path, message, got, "the model of the gate's job, or another compile.gate")
