"""Defines the parts of every spec: strict models, identifiers, the parallel degrees, the fields of any job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from service.jobs.spec.common.launcher_names import LAUNCHER_NAME
from service.jobs.spec.common.notify import ExportTargets, NotifySpec
from service.jobs.spec.common.strict import Strict, disagreement
from service.jobs.spec.common.sweep import SweepSpec

ID_EXPECTED = "id_expected"
"""Type of the error about a value that is no id; ``form`` in its context shows the form of an id."""
TOO_MANY_ERRORS = "too_many_errors"
"""Type of the error in place of more errors than anyone would read."""


@dataclass(frozen=True)
class IdsByName:
    """The context of a validation in which ids of jobs may be given by these names."""

    ids: Mapping[str, str]


def _id(what: str, printed_by: str, form: str) -> WrapValidator:
    """Refuse anything but an id, in words: whoever writes a path or a name does not know that the field takes an id.
    A name of :class:`IdsByName` stands for its id.
    """

    def check(value: Any, matches: ValidatorFunctionWrapHandler, info: ValidationInfo) -> str:
        known = info.context.ids if what == _JOB and isinstance(info.context, IdsByName) else {}
        try:
            matched: str = matches(known.get(value, value) if isinstance(value, str) else value)
        except ValidationError:
            message = f"expected {what}'s id, as `{printed_by}` prints it"
            accepted = f"one of {', '.join(known)}, or {form}" if known else form
            raise PydanticCustomError(ID_EXPECTED, "{message}", {"message": message, "form": accepted}) from None
        return matched

    return WrapValidator(check)


_JOB = "a job"
JOB_ID = re.compile(r"job_[0-9a-z]{20}")
"""A job's id: ``job_``, the time of submission and random characters."""
JobId = Annotated[
    str,
    StringConstraints(pattern=f"^{JOB_ID.pattern}$"),
    _id(_JOB, "trivet submit SPEC", "job_ and 20 letters or digits"),
]
FILE_ID_PREFIX = "file_"
FILE_ID = re.compile(rf"{FILE_ID_PREFIX}[0-9a-f]{{64}}")
"""An uploaded file's id: ``file_`` and the SHA-256 of its content."""


class FileReference(str):
    """An id in a field of type :data:`FileId`: only such a value refers to an upload, no other text that looks so."""

    __slots__ = ()


FileId = Annotated[
    str,
    StringConstraints(pattern=f"^{FILE_ID.pattern}$"),
    _id("a file", "trivet upload FILE", "file_ and 64 hexadecimal digits"),
    AfterValidator(FileReference),
]

PARALLEL_DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "tp")
_MOST_RANKS = 65_536
"""The most ranks of one job; the index of pending jobs covers as many."""


class ParallelSpec(Strict):
    """Degrees of parallelism; their product is the number of ranks (one device each)."""

    pp: int = Field(1, ge=1, le=1024, description="pipeline stages in space (ranks in a pipeline)")
    dp_replicate: int = Field(1, ge=1, le=4096, description="replicas of the sharded model (HSDP)")
    dp_shard: int = Field(1, ge=1, le=4096, description="FSDP2 shards of parameters, gradients and optimizer state")
    tp: int = Field(1, ge=1, le=1024, description="tensor-parallel ranks")

    @model_validator(mode="after")
    def _ranks_have_a_bound(self) -> Self:
        if self.world_size > _MOST_RANKS:
            widest = max(PARALLEL_DIMENSIONS, key=lambda name: int(getattr(self, name)))
            message = f"{self.arithmetic} ranks are more than one job may have"
            raise disagreement(widest, message, getattr(self, widest), f"{_MOST_RANKS} ranks at most")
        return self

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp(self) -> int:
        """Return the number of ranks that see different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def arithmetic(self) -> str:
        """Return the product as a user would check it, e.g. ``pp=2 × dp_replicate=1 × dp_shard=1 × tp=2 = 4``."""
        factors = " × ".join(f"{name}={getattr(self, name)}" for name in PARALLEL_DIMENSIONS)
        return f"{factors} = {self.world_size}"


_MOST_ERRORS = 2000
_LabelKey = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$")]
_LabelValue = Annotated[str, StringConstraints(max_length=120)]
_DeviceChoice = Literal["auto", "cuda", "cpu"]


@dataclass(frozen=True)
class Dependency:
    """A job that must succeed first: the field that names it, and its required kind (any if ``None``).

    A spec that names a job of kind ``train`` starts from that job's model. ``weights`` is the step of the weights
    that it takes, or ``latest``: then a job that failed or was cancelled also suffices, if it has left weights.
    """

    path: str
    job_id: str
    kind: str | None = None
    weights: int | Literal["latest"] | None = None


class FewErrors(Strict):
    """Is refused with one error where there are too many to list: each takes microseconds, and a megabyte can hold
    hundreds of thousands.
    """

    @model_validator(mode="wrap")
    @classmethod
    def _with_few_errors(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return validate(value)
        except ValidationError as error:
            if (count := error.error_count()) <= _MOST_ERRORS:
                raise
            raise PydanticCustomError(TOO_MANY_ERRORS, "{count} values are wrong", {"count": count}) from None


class CommonSpec(FewErrors):
    """Fields that every kind of job has. A kind's own class adds ``kind: Literal["its name"] = "its name"``."""

    if TYPE_CHECKING:
        kind: str

    name: str = Field("", max_length=200, description="free text shown in lists; the kind when empty")
    labels: dict[_LabelKey, _LabelValue] = Field(
        default_factory=dict, max_length=32, description="`key: value` pairs to find and group jobs by"
    )
    priority: int = Field(0, ge=-100, le=100, description="higher runs first; age decides between equals")
    preemptible: bool = Field(
        False,
        description="whether it may be asked to make room for a job of higher priority that fits nowhere: it then "
        "writes a checkpoint, is queued again and continues later, without using a retry",
    )
    retries: int = Field(0, ge=0, le=100, description="attempts after the first one")
    timeout_s: float | None = Field(None, gt=0, description="limit on the running time of one attempt, in seconds")
    stall_s: float | None = Field(
        3600.0,
        gt=0,
        description="seconds without a report or output of its ranks after which an attempt fails; null for no limit",
    )
    after: list[JobId] = Field(default_factory=list, max_length=64, description="jobs that must succeed first")
    parallel: ParallelSpec = ParallelSpec()
    max_hosts: int = Field(1, ge=1, le=1024, description="most hosts over which the ranks may be spread")
    device: _DeviceChoice = Field(
        "auto", description="where the ranks run; auto: on GPUs if hosts have any, else on CPU slots"
    )
    launcher: str | None = Field(
        None,
        pattern=LAUNCHER_NAME.pattern,
        exclude_if=lambda name: name is None,  # a worker of an older version does not know the field
        description="where its devices come from: `local`, the hosts of the service, or a scheduler's launcher, such "
        "as `slurm`; the operator's choice when absent",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="seed of weights, data order and everything else that is random")
    notify: NotifySpec | None = Field(
        None,
        exclude_if=lambda notify: notify is None,  # a worker of an older version does not know the field
        description="a URL that gets signed requests about the job's progress",
    )
    export: ExportTargets = Field(
        ExportTargets(),
        exclude_if=lambda export: export == ExportTargets(),  # as above
        description="services that get metrics while the job runs, and its results when it ends",
    )
    sweep: SweepSpec | None = Field(None, description="values of other fields; each combination is its own job")

    @property
    def stands_for_others(self) -> bool:
        """Return whether the job holds no devices: other jobs, which are submitted with it, run in its place."""
        return self.sweep is not None

    @property
    def brings_code(self) -> bool:
        """Return whether ranks run code of the job's author: only in confinement, where the operator allows it."""
        return False

    @model_validator(mode="after")
    def _no_duplicate_dependencies(self) -> CommonSpec:
        if len(set(self.after)) != len(self.after):
            raise disagreement("after", "it names a job twice", self.after, "each job once")
        return self

    def dependencies(self) -> tuple[Dependency, ...]:
        """Return all jobs that the spec names, those of ``after`` last. One job may appear twice."""
        return tuple(Dependency(f"after.{index}", job_id) for index, job_id in enumerate(self.after))

    @property
    def gate_job(self) -> str | None:
        """Return the id of the compile job whose published artifacts the ranks of this job rely on."""
        return None
