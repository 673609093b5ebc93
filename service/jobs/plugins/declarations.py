"""Declarations: a configuration class and the dotted name (``package.module:function``) of what ranks call.

The dotted functions are typed where torch may be imported: ``service.models.registry.Builder``,
``service.models.data.Loader``, ``service.training.objective.Factory`` and ``service.compilation.program.Maker``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Union

from pydantic import Field
from typing_extensions import TypeAliasType

from service.jobs.plugins.configs import DataConfig, ModelConfig, ObjectiveConfig, ProgramConfig


def one_of(forms: tuple[Any, ...]) -> Any:
    """The union of types that are only known at run time."""
    return Union[forms]  # noqa: UP007


@lru_cache
def _by_format(forms: tuple[type[DataConfig], ...]) -> Any:
    """The forms of one source. An alias of its own: a JSON Schema that maps tags can only map them to references."""
    name = str(forms[0].model_fields["source"].default).capitalize()
    return TypeAliasType(f"{name}Source", Annotated[one_of(forms), Field(discriminator="format")])


@dataclass(frozen=True)
class ModelFamily:
    """``builder(config, axis)`` plans the module on the meta device, divided over the tensor-parallel ``axis``."""

    group: ClassVar[str] = "trivet.models"
    tag: ClassVar[str] = "family"
    base: ClassVar[type] = ModelConfig
    config: type[ModelConfig]
    builder: str

    @property
    def form(self) -> Any:
        """The type that a spec's value is read as."""
        return self.config


@dataclass(frozen=True)
class DataSource:
    """``loader(config, layout)`` reads the samples on every rank; the same ones on each.

    A source with several forms, told apart by their field ``format``, names the other ones in ``variants``.
    """

    group: ClassVar[str] = "trivet.data"
    tag: ClassVar[str] = "source"
    base: ClassVar[type] = DataConfig
    config: type[DataConfig]
    loader: str
    variants: tuple[type[DataConfig], ...] = ()

    @property
    def form(self) -> Any:
        """The type that a spec's value is read as."""
        if not self.variants:
            return self.config
        return _by_format((self.config, *self.variants))


@dataclass(frozen=True)
class ObjectiveKind:
    """``factory(config, subject)`` gives what training minimises and evaluation reports."""

    group: ClassVar[str] = "trivet.objectives"
    tag: ClassVar[str] = "name"
    base: ClassVar[type] = ObjectiveConfig
    config: type[ObjectiveConfig]
    factory: str

    @property
    def form(self) -> Any:
        """The type that a spec's value is read as."""
        return self.config


@dataclass(frozen=True)
class ProgramKind:
    """``maker(config, site)`` gives the program of a compile job: modules, and the steps made of them."""

    group: ClassVar[str] = "trivet.programs"
    tag: ClassVar[str] = "name"
    base: ClassVar[type] = ProgramConfig
    config: type[ProgramConfig]
    maker: str

    @property
    def form(self) -> Any:
        """The type that a spec's value is read as."""
        return self.config
