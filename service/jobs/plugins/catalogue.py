"""Loads the declarations that specs can name: built-in ones, and those of installed packages."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints, PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from typing import Annotated, Any, Generic, Literal, TypeVar, cast, get_args, get_origin

from pydantic import BeforeValidator, Field, TypeAdapter
from pydantic_core import PydanticCustomError

from service.jobs.plugins.declarations import DataSource, Declaration, JobKind, one_of
from service.jobs.records.kinds import BrokenChoice

logger = logging.getLogger(__name__)
Kind = TypeVar("Kind", bound=Declaration[Any])
HOUSE = "trivet"


class _PluginError(Exception):
    """A declaration cannot be used; the message says why."""


@dataclass(frozen=True)
class _Provided(Generic[Kind]):
    """A usable declaration and its distribution."""

    declaration: Kind
    distribution: str
    version: str


@dataclass(frozen=True)
class Catalogue(Generic[Kind]):
    """Everything of one group by name."""

    group: str
    tag: str
    provided: Mapping[str, _Provided[Kind]]
    unavailable: tuple[BrokenChoice, ...] = ()
    default: str | None = None
    """The name that holds where a specification names none."""

    def declaration(self, name: str) -> Kind:
        """Return the declaration of a name. Raises ``KeyError`` if it is not available."""
        return self.provided[name].declaration

    def function(self, name: str) -> Any:
        """Import the function that ranks call for a name. Raises ``ValueError`` if it is not available."""
        if name not in self.provided:
            raise ValueError(f"{self.group} has no {name!r}; expected one of {', '.join(sorted(self.provided))}")
        module, _, function = self.declaration(name).function.partition(":")
        return getattr(import_module(module), function)

    def union(self) -> Any:
        """Return the type of all configurations, for a pydantic field that is discriminated by ``tag``."""
        return one_of(tuple(each.declaration.form for each in self.provided.values()))

    def choice(self, *read: BeforeValidator) -> Any:
        """Return the type of a spec's field that chooses one of these by ``tag``; ``read`` validators come before, the
        last first.
        """
        tagged = self.union(), Field(discriminator=self.tag), BeforeValidator(self.refuse_unavailable)
        return Annotated[(*tagged, *read)]

    def read_name(self, value: Any) -> Any:
        """Read a bare name as what has it, with nothing to set, and fields without a name as those of the default."""
        if isinstance(value, str):
            return {self.tag: value}
        if isinstance(value, Mapping) and self.tag not in value and self.default is not None:
            return {self.tag: self.default, **value}
        return value

    def refuse_unavailable(self, value: Any) -> Any:
        """Validate before the union, to explain why an installed name is unavailable."""
        named = value.get(self.tag) if isinstance(value, Mapping) else None
        for each in self.unavailable:
            if each.name == named and named not in self.provided:
                known = ", ".join(self.provided)
                raise PydanticCustomError(
                    "plugin_unavailable",
                    "{tag} {name} of {package} is installed but unavailable: {reason}; available are {known}",
                    {
                        "tag": self.tag,
                        "name": repr(named),
                        "package": f"{each.distribution} {each.version}",
                        "reason": each.reason,
                        "known": known,
                    },
                )
        return value


def installed(group: str) -> Sequence[EntryPoint]:
    """Return the entry points of a group, in an order that does not depend on the search path."""
    points = _installed_on(tuple(sys.path)).select(group=group)
    found = {(point.name, point.value, _distribution(point)): point for point in points}
    return [found[key] for key in sorted(found)]


@cache
def _installed_on(path: tuple[str, ...]) -> EntryPoints:
    """Return the entry points of all packages on the search path, whose files are read once for all catalogues."""
    # Python 3.11 has another class, which selects alike.
    return cast(EntryPoints, entry_points())


def catalogue(
    kind: type[Kind],
    built_in: Iterable[Kind],
    find: Callable[[str], Sequence[EntryPoint]] = installed,
    default: str | None = None,
) -> Catalogue[Kind]:
    """Load every declaration; log and set aside any that is broken or claims a taken name, whatever it raises."""
    provided = {_only_name(each.config, each.tag): _Provided(each, HOUSE, house_version()) for each in built_in}
    points = find(kind.group)
    claims = Counter(point.name for point in points)
    unavailable = []
    for point in points:
        distribution, release = _distribution(point)
        try:
            _check_name(point.name, provided, claims[point.name])
            provided[point.name] = _Provided(_load(kind, point), distribution, release)
        except BaseException as error:  # a package may raise anything, and must not bring the service down
            if isinstance(error, KeyboardInterrupt):
                raise
            reason = str(error) if isinstance(error, _PluginError) else f"{type(error).__name__}: {error}"
            unavailable.append(
                BrokenChoice(
                    group=kind.group, name=point.name, distribution=distribution, version=release, reason=reason
                )
            )
            logger.warning("%s %r of %s is unavailable: %s", kind.group, point.name, distribution, reason)
    return Catalogue(kind.group, kind.tag, provided, tuple(unavailable), default)


def _only_name(config: type[Any], tag: str) -> str:
    field = config.model_fields[tag]
    names = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    if len(names) != 1 or not isinstance(names[0], str) or field.default != names[0]:
        wanted = f'{tag}: Literal["name"] = "name"'
        raise _PluginError(f"{config.__name__} must have one name, as in {wanted}")
    return names[0]


def _check_name(name: str, provided: Mapping[str, Any], claims: int) -> None:
    """Check that a name is free. If several packages claim it, none gets it: otherwise chance would choose a
    job's code.
    """
    if claims > 1:
        raise _PluginError(f"{claims} installed packages claim this name")
    if name in provided:
        raise _PluginError("the name is taken by a built-in one")


def _load(kind: type[Kind], point: EntryPoint) -> Kind:
    declaration = point.load()
    if not isinstance(declaration, kind):
        raise _PluginError(f"{point.value} is a {type(declaration).__name__}; expected a {kind.__name__}")
    _check_config(kind, point, "config", declaration.config)
    variants: tuple[Any, ...] = declaration.variants if isinstance(declaration, DataSource) else ()
    for variant in variants:
        _check_config(kind, point, "variant", variant)
    if isinstance(declaration, JobKind):
        _check_references(declaration)
    # This finds bad forms before they enter the union of all packages.
    TypeAdapter(declaration.form).json_schema()
    return declaration


def _check_config(kind: type[Kind], point: EntryPoint, role: str, config: Any) -> None:
    if not (isinstance(config, type) and issubclass(config, kind.base)):
        raise _PluginError(f"its {role} is {config!r}; expected a subclass of {kind.base.__name__}")
    if missing := sorted(getattr(config, "__abstractmethods__", ())):
        raise _PluginError(f"{config.__name__} lacks {', '.join(missing)}")
    if (name := _only_name(config, kind.tag)) != point.name:
        raise _PluginError(f"{config.__name__} is named {name!r}, its entry point {point.name!r}")


def _check_references(declared: JobKind) -> None:
    """Check that everything a declaration names by path exists, without importing the rank program."""
    module, _, function = declared.function.partition(":")
    if not function or find_spec(module) is None:
        raise _PluginError(f"its function {declared.function!r} is not there; expected package.module:function")
    if declared.page_file is not None and not declared.page_file.is_file():
        raise _PluginError(f"its page {declared.page!r} is not there; expected package:path of an ES module")


@cache
def house_version() -> str:
    """Return the installed version of Trivet, or ``checkout`` if it was never installed."""
    try:
        return version(HOUSE)
    except PackageNotFoundError:
        return "checkout"


def _distribution(point: EntryPoint) -> tuple[str, str]:
    return (point.dist.name, point.dist.version) if point.dist is not None else ("unknown", "")
