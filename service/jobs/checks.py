"""Checks of a whole spec at submit: everything that can be known before a device is touched.

A spec that passes pydantic is well-formed; these rules ask whether its parts fit each other, the jobs that it names
and the fleet. Pure: the fleet and the other jobs are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from service.jobs.records import Job, Problem
from service.jobs.spec import CompileSpec, TrainSpec, VerifySpec
from service.jobs.spec.data import DataSpec, DigitsData, TokensData
from service.jobs.spec.model import FamilyConfig, FromJob, MlpConfig, TransformerConfig
from service.jobs.spec.verify import Box, BoxProperty, Robustness
from service.jobs.states import TERMINAL

AnySpec = TrainSpec | VerifySpec | CompileSpec
Config = MlpConfig | TransformerConfig
Lookup = Callable[[str], Job | None]

_DIGITS_SAMPLES = 1797
_LONGEST_CHAIN = 64
"""Of training jobs that start from each other's models."""
_config_adapter: TypeAdapter[Config] = TypeAdapter(FamilyConfig)


@dataclass(frozen=True)
class Dependency:
    """A job that must succeed first: where the spec names it, and which kind it has to be (any when ``None``)."""

    path: str
    job_id: str
    kind: Literal["train", "compile"] | None = None


def check(spec: AnySpec, fleet_capacity: Mapping[str, int] | None, lookup: Lookup) -> list[Problem]:
    """Every reason why this job could never run; empty when there is none.

    ``fleet_capacity`` counts the devices of the known hosts by pool (``cuda``, ``cpu``); ``None``: no host is known.
    """
    config = _resolve(spec.model, lookup)
    return [
        *_check_dependencies(spec, lookup),
        *_check_mesh(spec, config),
        *_check_fit(spec, config),
        *_check_batch(spec),
        *_check_fleet(spec, fleet_capacity),
    ]


def dependencies(spec: AnySpec) -> tuple[Dependency, ...]:
    """All jobs that the spec names: its model's, its gate's, and those of ``after``. One job may appear twice."""
    found = []
    if isinstance(spec.model, FromJob):
        found.append(Dependency("model.job", spec.model.job, "train"))
    if isinstance(spec, TrainSpec) and spec.compile.gate is not None:
        found.append(Dependency("compile.gate", spec.compile.gate, "compile"))
    return (*found, *(Dependency(f"after.{index}", job_id) for index, job_id in enumerate(spec.after)))


def pool_of(spec: AnySpec, fleet_capacity: Mapping[str, int]) -> Literal["cuda", "cpu"]:
    """Where the ranks would run: as the spec says, or CUDA if the fleet has any."""
    if spec.device != "auto":
        return spec.device
    return "cuda" if fleet_capacity.get("cuda", 0) else "cpu"


def _check_dependencies(spec: AnySpec, lookup: Lookup) -> Iterator[Problem]:
    for needed in dependencies(spec):
        job = lookup(needed.job_id)
        wanted = f"a {needed.kind} job" if needed.kind else "a job"
        expected = f"{wanted} that has succeeded or still can"
        if job is None:
            yield Problem(needed.path, f"there is no job {needed.job_id}", needed.job_id, expected)
        elif needed.kind not in (None, job.kind):
            yield Problem(needed.path, f"job {job.id} is a {job.kind} job", job.id, expected)
        elif job.state in TERMINAL - {"succeeded"}:
            yield Problem(needed.path, f"job {job.id} has {_ended(job.state)}", job.id, expected)


def _ended(state: str) -> str:
    return "failed" if state == "failed" else "been cancelled"


def _resolve(model: Config | FromJob, lookup: Lookup) -> Config | None:
    """The family configuration behind a reference, through jobs that start from others; ``None`` if unknown."""
    for _ in range(_LONGEST_CHAIN):
        if not isinstance(model, FromJob):
            return model
        job = lookup(model.job)
        if job is None or job.kind != "train":
            return None
        given: dict[str, Any] = job.spec["model"]
        model = FromJob.model_validate(given) if "job" in given else _config_adapter.validate_python(given)
    return None


def _check_mesh(spec: AnySpec, config: Config | None) -> Iterator[Problem]:
    if config is None:
        return
    for path, message, got, expected in config.check_parallel(spec.parallel):
        if not isinstance(spec.model, FromJob):
            yield Problem(path, message, got, expected)
        elif path.startswith("parallel."):
            yield Problem(path, f"job {spec.model.job}: {message}", got, expected)
        else:
            size = f"job {spec.model.job}, {path}: {message}"
            yield Problem("parallel.tp", size, spec.parallel.tp, f"a divisor of {got}")


def _check_fit(spec: AnySpec, config: Config | None) -> Iterator[Problem]:
    if config is None:
        return
    where = "model" if not isinstance(spec.model, FromJob) else None
    if not isinstance(spec, VerifySpec):
        if spec.data is not None:
            yield from _check_data(spec.data, "data", config, where)
    elif isinstance(config, TransformerConfig):
        path = "model.job" if where is None else "model.family"
        yield Problem(path, "token ids have no box around them to certify", "transformer", "an mlp")
    elif isinstance(spec.property, BoxProperty):
        yield from _check_box(spec.property.box, config)
    else:
        yield from _check_robustness(spec.property.robustness, config, where)


def _check_data(data: DataSpec, path: str, config: Config, model_path: str | None) -> Iterator[Problem]:
    """``model_path`` is where the spec holds the configuration; ``None`` when it comes from a job."""
    if isinstance(data, TokensData) != isinstance(config, TransformerConfig):
        reads = "tokens" if isinstance(config, TransformerConfig) else "digits or synthetic"
        yield Problem(f"{path}.source", f"a model of family {config.family} cannot read this", data.source, reads)
    elif isinstance(data, TokensData) and isinstance(config, TransformerConfig):
        yield from _check_tokens(data, path, config, model_path)
    elif not isinstance(data, TokensData) and isinstance(config, MlpConfig):
        yield from _size(data.features, f"{path}.features", config.in_features, model_path, "in_features")
        yield from _size(data.classes, f"{path}.classes", config.out_features, model_path, "out_features")


def _size(given: int, data_path: str, built: int, model_path: str | None, field: str) -> Iterator[Problem]:
    if given == built:
        return
    message = f"the model has {field}={built}, the data has {data_path.rpartition('.')[2]}={given}"
    if model_path is None:
        yield Problem(data_path.rpartition(".")[0], message, given, str(built))
    else:
        yield Problem(f"{model_path}.{field}", message, built, str(given))


def _check_tokens(data: TokensData, path: str, config: TransformerConfig, model_path: str | None) -> Iterator[Problem]:
    if data.sequence > config.max_sequence:
        message = f"sequence={data.sequence} is longer than the model's max_sequence={config.max_sequence}"
        yield Problem(f"{path}.sequence", message, data.sequence, f"at most {config.max_sequence}")
    if config.vocab_size < data.vocabulary:
        message = f"the data has {data.vocabulary} tokens, the model has vocab_size={config.vocab_size}"
        where = f"{path}.source" if model_path is None else f"{model_path}.vocab_size"
        got = data.source if model_path is None else config.vocab_size
        yield Problem(where, message, got, f"vocab_size of at least {data.vocabulary}")


def _check_box(box: Box, config: MlpConfig) -> Iterator[Problem]:
    if len(box.lower) != config.in_features:
        message = f"the box has {len(box.lower)} dimensions, the model has in_features={config.in_features}"
        yield Problem("property.box.lower", message, len(box.lower), f"{config.in_features} numbers")
    for index, halfspace in enumerate(box.output):
        if (length := len(halfspace.coefficients)) != config.out_features:
            message = f"{length} coefficients for out_features={config.out_features}"
            path = f"property.box.output.{index}.coefficients"
            yield Problem(path, message, length, f"{config.out_features} numbers")


def _check_robustness(robustness: Robustness, config: MlpConfig, model_path: str | None) -> Iterator[Problem]:
    yield from _check_data(robustness.data, "property.robustness.data", config, model_path)
    data = robustness.data
    available = (_DIGITS_SAMPLES if isinstance(data, DigitsData) else data.samples) // 5
    if robustness.count > available:
        message = f"the test split of {data.source} has {available} samples"
        yield Problem("property.robustness.count", message, robustness.count, f"at most {available}")


def _check_batch(spec: AnySpec) -> Iterator[Problem]:
    """A global batch is ``dp × micro-batches × micro``, in whole numbers."""
    if not isinstance(spec, TrainSpec):
        return
    dp, batch, micro = spec.parallel.dp, spec.batch.global_, spec.batch.micro
    if batch % dp:
        replicas = f"dp_replicate={spec.parallel.dp_replicate} × dp_shard={spec.parallel.dp_shard} = {dp}"
        yield Problem("batch.global", f"{batch} samples do not divide by {replicas}", batch, f"a multiple of {dp}")
        return
    share = batch // dp
    arithmetic = f"global={batch} / dp={dp} = {share} samples per data-parallel rank"
    asked = spec.pipeline.micro_batches
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


def _check_fleet(spec: AnySpec, fleet_capacity: Mapping[str, int] | None) -> Iterator[Problem]:
    if fleet_capacity is None:
        return
    pool = pool_of(spec, fleet_capacity)
    available = fleet_capacity.get(pool, 0)
    if available == 0:
        others = ", ".join(name for name, count in fleet_capacity.items() if count) or "none"
        yield Problem("device", f"the fleet has no {pool} devices", spec.device, f"a device that it has: {others}")
    elif spec.parallel.world_size > available:
        message = f"{spec.parallel.arithmetic} ranks, but the fleet has {available} {pool} devices"
        yield Problem("parallel", message, spec.parallel.world_size, f"at most {available} ranks")
