"""Loads atomic scripts: one Lua file each, called through a typed stub that is checked against the file at import.

A script's header names its arguments and the library files that it uses::

    -- USES: core jobs
    -- ARGV: limits: json, job_id: str, attempt: int, *events: str

From it come the Lua locals of the same names (``int`` as a number, ``json`` decoded, ``*`` as a list), so a script
never counts positions, and a stub whose parameters differ in name, order or type fails when the module is imported.
Key names, the allowed moves of a job's state, the fields that lists show and the buckets of histograms are generated
from their Python home.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import inspect
import re
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast

from service.jobs.monitoring.catalogue import CAUSES, COUNTS
from service.jobs.spec.common import MOVES
from service.jobs.store.client import BrokerClient
from service.jobs.store.decode import LISTED_FIELDS
from service.jobs.store.keyspace import KEYS

P = ParamSpec("P")
R = TypeVar("R")
Caller = Literal["api", "host"]
"""The API, with the restore of a backup; and agents and supervisors."""

_LUA = importlib.resources.files("service.jobs.store") / "lua"
_READERS = {"str": "ARGV[{}]", "int": "tonumber(ARGV[{}])", "json": "cjson.decode(ARGV[{}])"}
_PYTHON_TYPES = {"str": "str", "int": "int", "json": "str"}


class HeaderMismatch(Exception):  # noqa: N818
    """A script's header and its Python stub disagree."""


class Script(Generic[P, R]):
    """A loaded script; call it with a client and the stub's arguments. A host's user of the broker may use its keys and
    commands if hosts are among its ``callers``.
    """

    def __init__(self, name: str, callers: frozenset[Caller], stub: Callable[P, R]) -> None:
        source = (_LUA / f"{name}.lua").read_text()
        arguments = _header_arguments(source)
        _check_stub(name, arguments, stub)
        self.name, self.callers = name, callers
        self._signature = inspect.signature(stub)
        self._words = [argument for argument, _ in arguments]
        self.text = assemble(source, arguments)
        self._body = "\n".join([*_libraries(source), source])
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        self.__doc__ = stub.__doc__

    @cached_property
    def keys(self) -> frozenset[str]:
        """Return the families of keys that the script and its libraries name."""
        return frozenset(re.findall(r"\bKEY\.(\w+)", self._body))

    @cached_property
    def commands(self) -> frozenset[str]:
        """Return the commands that they call."""
        return frozenset(re.findall(r'\bredis\.call\(\s*"(\w+)"', self._body))

    def __call__(self, client: BrokerClient, *args: P.args, **kwargs: P.kwargs) -> R:
        named = self._words[len(args) :]
        if len(named) == len(kwargs) and all(name in kwargs for name in named):
            words: list[object] = [*args, *(kwargs[name] for name in named)]
        else:
            bound = self._signature.bind(*args, **kwargs)
            words = [*bound.args, *bound.kwargs.values()]
        return cast(R, client.script(self.sha, self.text, words))


def script(name: str, *callers: Caller) -> Callable[[Callable[P, R]], Script[P, R]]:
    """Bind a stub to ``lua/{name}.lua``, which these parts call. Raises :class:`HeaderMismatch` at import when stub and
    file disagree.
    """

    def bind(stub: Callable[P, R]) -> Script[P, R]:
        return Script(name, frozenset(callers), stub)

    return bind


def _header_lines(source: str, word: str) -> str:
    return " ".join(re.findall(rf"^-- {word}: (.*)$", source, re.MULTILINE))


def _header_arguments(source: str) -> list[tuple[str, str]]:
    """Return (name, type) in order; the name of a variadic last one starts with ``*``."""
    words = [word.strip() for word in _header_lines(source, "ARGV").split(",") if word.strip()]
    return [(name.strip(), kind.strip()) for name, _, kind in (word.partition(":") for word in words)]


def _check_stub(name: str, arguments: list[tuple[str, str]], stub: Callable[..., Any]) -> None:
    in_header = [(argument, _PYTHON_TYPES.get(kind, kind)) for argument, kind in arguments]
    in_stub = [
        (f"*{parameter.name}" if parameter.kind is parameter.VAR_POSITIONAL else parameter.name, parameter.annotation)
        for parameter in inspect.signature(stub).parameters.values()
    ]
    if in_header != in_stub:
        raise HeaderMismatch(f"lua/{name}.lua declares {in_header}, but its stub takes {in_stub}")


def assemble(source: str, arguments: list[tuple[str, str]]) -> str:
    """Return the whole text of a script: the names of keys and the tables that it uses, its arguments, its
    library files, and itself. The broker runs all of it at each call.
    """
    body = [*_locals(arguments), *_libraries(source), source]
    words = set(re.findall(r"\w+", "\n".join(body)))
    keys = [key.lua for key in KEYS if key.name in words]
    tables = [text for name, text in _tables().items() if name in words]
    return "\n".join(["local KEY = {}", *keys, *tables, *body])


def _libraries(source: str) -> list[str]:
    return [_library(name) for name in _header_lines(source, "USES").split()]


@cache
def _library(name: str) -> str:
    return (_LUA / "lib" / f"{name}.lua").read_text()


@cache
def _tables() -> dict[str, str]:
    moves = ", ".join(
        f"{old} = {{{', '.join(f'{new} = true' for new in sorted(targets))}}}" for old, targets in MOVES.items()
    )
    buckets = ", ".join(
        f"{metric.name} = {{{', '.join(repr(bound) for bound in metric.bounds[:-1])}}}"
        for metric in COUNTS
        if metric.buckets
    )
    causes = ", ".join(f"{cause} = true" for cause in CAUSES)
    listed = ", ".join(f'"{name}"' for name in LISTED_FIELDS)
    tables = {"MOVES": moves, "BUCKETS": buckets, "CAUSES": causes, "LISTED": listed}
    return {name: f"local {name} = {{{text}}}" for name, text in tables.items()}


def _locals(arguments: list[tuple[str, str]]) -> list[str]:
    lines = []
    for index, (name, kind) in enumerate(arguments, start=1):
        if name.startswith("*"):
            rest = name.removeprefix("*")
            lines.append(f"local {rest} = {{}} for i = {index}, #ARGV do {rest}[#{rest} + 1] = ARGV[i] end")
        else:
            lines.append(f"local {name} = {_READERS[kind].format(index)}")
    return lines
