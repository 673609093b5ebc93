"""Declarations: a configuration class, and the name of the function that ranks call.

The functions are typed where torch may be imported: ``service.models.registry.Builder``,
``service.models.data.Loader``, ``service.objectives.Factory``, ``service.training.optimizers.Factory``,
``service.models.program.Maker`` and ``service.jobs.runtime.Runner``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, Union

from pydantic import BaseModel, Field
from typing_extensions import TypeAliasType

from service.jobs.plugins.configs import (
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ProgramConfig,
    ScheduleConfig,
)
from service.jobs.records import Job, Problem
from service.jobs.spec.common import CommonSpec, StoppingRule

Config = TypeVar("Config", bound=BaseModel)


@dataclass(frozen=True)
class CheckContext:
    """The facts besides a spec that checks know at submission.

    By default: no host, no other job, and every file unread.
    """

    fleet_capacity: Mapping[str, int] | None = None
    """Devices of the known hosts, including drained ones, by pool (``cuda``, ``cpu``); ``None`` if no host is
    known.
    """
    fleet_packages: Collection[str] | None = None
    """Packages that one of the known hosts has; ``None`` if no host is known."""
    lookup: Callable[[str], Job | None] = lambda _: None
    """Returns another job by its id."""
    has_file: Callable[[str], bool] = lambda _: True
    """Whether a file was uploaded, by its id."""
    uploaded: Callable[[str], ModelConfig | None] = lambda _: None
    """Returns the model's configuration in an uploaded archive, by its id; ``None`` if it is unknown. Raises
    ``ValueError`` if the archive holds no model for ranks.
    """
    path_of: Callable[[str], Path | None] = lambda _: None
    """Returns the path of an uploaded file's content, by its id; ``None`` if unknown."""
    weights_of: Callable[[str], Collection[int]] = lambda _: ()
    """Returns the steps for which a training job has left weights, by its id."""
    checkpoints_of: Callable[[str], Collection[int]] = lambda _: ()
    """Returns the steps of a training job's complete checkpoints, by its id."""
    without_scripts: Collection[str] = ()
    """The submission's projects that may not run scripts of their own."""
    auto_pool: Literal["cuda", "cpu"] = "cpu"
    """The present pool of the device ``auto``: ``cuda`` if a host that is not drained has any."""


def one_of(forms: tuple[Any, ...]) -> Any:
    """Return the union of types that are only known at run time."""
    return Union[forms]  # noqa: UP007


@lru_cache
def _by_format(forms: tuple[type[DataConfig], ...]) -> Any:
    """Return the forms of one source as an alias, since a JSON Schema can map tags only to references."""
    name = str(forms[0].model_fields["source"].default).capitalize()
    return TypeAliasType(f"{name}Source", Annotated[one_of(forms), Field(discriminator="format")])


@dataclass(frozen=True)
class Declaration(Generic[Config]):
    """Declares something that a spec can name: packages offer it as an entry point of ``group``, specs choose it by
    the field ``tag`` of its configuration, a subclass of ``base``.
    """

    group: ClassVar[str]
    tag: ClassVar[str]
    base: ClassVar[type]
    config: type[Config]
    function: str
    """The function that ranks call, and that they alone import, as ``package.module:function``."""

    @property
    def form(self) -> Any:
        """Return the type as which a spec's value is read."""
        return self.config


class ModelFamily(Declaration[ModelConfig]):
    """``function(config, axis)`` plans the module on the meta device, divided over the tensor-parallel ``axis``."""

    group, tag, base = "trivet.models", "family", ModelConfig


@dataclass(frozen=True)
class DataSource(Declaration[DataConfig]):
    """``function(config, layout)`` reads the same samples on every rank.

    A source with several forms, distinguished by their field ``format``, names the others in ``variants``.
    """

    group, tag, base = "trivet.data", "source", DataConfig
    variants: tuple[type[DataConfig], ...] = ()

    @property
    def form(self) -> Any:
        """Return the type as which a spec's value is read."""
        if not self.variants:
            return self.config
        return _by_format((self.config, *self.variants))


class ObjectiveKind(Declaration[ObjectiveConfig]):
    """``function(config, context)`` makes the objective that training minimises and evaluation reports."""

    group, tag, base = "trivet.objectives", "name", ObjectiveConfig


class OptimizerKind(Declaration[OptimizerConfig]):
    """``function(config, groups, device)`` makes the optimizers of torch that update a rank's parameters."""

    group, tag, base = "trivet.optimizers", "name", OptimizerConfig


@dataclass(frozen=True)
class ScheduleKind(Declaration[ScheduleConfig]):
    """A learning-rate schedule: its configuration computes it, without a function."""

    group, tag, base = "trivet.schedules", "decay", ScheduleConfig
    function: str = ""


class ProgramKind(Declaration[ProgramConfig]):
    """``function(config, site)`` makes a program to be checked and trained: modules, and steps that use them."""

    group, tag, base = "trivet.programs", "name", ProgramConfig


def _no_problems(_: Any, __: CheckContext) -> Iterable[Problem]:
    return ()


@dataclass(frozen=True)
class JobKind(Declaration[CommonSpec]):
    """A kind of job, from its submission to its page.

    ``function(spec, context)`` runs on every rank; what it returns on rank 0 becomes the job's result.
    ``check(spec, context)`` yields every reason why a job could never run, beside those that hold for any kind.
    ``page`` names a file in a package (``package:path``), an ES module whose function ``sections()`` returns what the
    middle of the job page shows; result and metrics where there is none. ``report`` names the JSON artifact that
    ``/v1/jobs/{id}/report`` answers with; the result where there is none. ``preloads`` names modules that ranks import
    anyway, the function's own first: hosts import them before there is a job, and fork its ranks. Their import must
    change nothing else: start no thread, initialise no device, open no file, set no variable.
    ``check_stop(spec, rule, jobs)`` yields why the rule of a sweep of so many jobs could not follow this one, which
    reports metrics by steps and ends when ``RunContext.ends_early`` says so; ``None`` for a kind whose jobs do neither.
    """

    group, tag, base = "trivet.kinds", "kind", CommonSpec
    check: Callable[[Any, CheckContext], Iterable[Problem]] = _no_problems
    page: str | None = None
    report: str | None = None
    preloads: tuple[str, ...] = ()
    check_stop: Callable[[Any, StoppingRule, int], Iterable[Problem]] | None = None

    @property
    def page_file(self) -> Path | None:
        """Return the path of the page's module; imports the package that holds it."""
        if self.page is None:
            return None
        package, _, path = self.page.partition(":")
        return Path(str(resources.files(package))) / path


GROUPS = tuple(
    kind.group for kind in (ModelFamily, DataSource, ObjectiveKind, OptimizerKind, ScheduleKind, ProgramKind, JobKind)
)
"""The groups of entry points by which packages extend the service."""
