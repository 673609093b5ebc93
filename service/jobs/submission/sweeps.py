"""Expands sweeps: from a spec with values for its fields to the spec of each job."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import orjson

from service.jobs.spec.common import CommonSpec, RangeSpec, SweepSpec

_LONGEST_NAME = 200
Parameters = dict[str, Any]
"""The swept fields of one job, by dotted path."""


class NoPlace(Exception):  # noqa: N818 - names what is wrong with the path
    """A path does not exist in a spec: it leads to a missing entry of a list, or into a value without fields."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True)
class SweptSpec:
    """The raw spec of one job of a sweep, and its values of the swept fields."""

    parameters: Parameters
    body: dict[str, Any]


def points(sweep: SweepSpec) -> Iterator[Parameters]:
    """Yield the values of each job; of a grid the last field varies fastest."""
    if sweep.list is not None:
        yield from sweep.list
    elif sweep.random is not None:
        draws = Random(sweep.random.seed)  # noqa: S311 - nothing is secret
        for _ in range(sweep.random.jobs):
            yield {path: _drawn(values, draws) for path, values in sweep.random.fields.items()}
    elif sweep.zip is not None:
        for values in zip(*sweep.zip.values(), strict=True):
            yield dict(zip(sweep.zip, values, strict=True))
    elif sweep.grid is not None:
        for values in itertools.product(*sweep.grid.values()):
            yield dict(zip(sweep.grid, values, strict=True))


def _drawn(values: RangeSpec | list[Any], draws: Random) -> Any:
    """Return one of the values; a number of a range has six digits, and is no further than its ends."""
    if isinstance(values, list):
        return draws.choice(values)
    if values.log:
        drawn = math.exp(draws.uniform(math.log(values.low), math.log(values.high)))
    elif values.whole:
        return draws.randint(int(values.low), int(values.high))
    else:
        drawn = draws.uniform(values.low, values.high)
    within = min(max(float(f"{drawn:.6g}"), values.low), values.high)
    return round(within) if values.whole else within


def expand(spec: CommonSpec) -> Iterator[SweptSpec]:
    """Yield the spec of each job of a sweep. Raises :class:`NoPlace`."""
    assert spec.sweep is not None
    base = spec.model_dump(mode="json", by_alias=True, exclude={"sweep"}, exclude_unset=True) | {"kind": spec.kind}
    for parameters in points(spec.sweep):
        body = copy.deepcopy(base)
        for path, value in parameters.items():
            _assign(body, path, value)
        if "name" not in parameters:
            body["name"] = _name(spec, parameters)
        yield SweptSpec(parameters, body)


def _name(spec: CommonSpec, parameters: Parameters) -> str:
    values = ", ".join(f"{path}={_text(value)}" for path, value in parameters.items())
    return f"{spec.name}: {values}"[:_LONGEST_NAME] if spec.name else values[:_LONGEST_NAME]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _assign(body: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    target: Any = body
    for name in parents:
        target = target.setdefault(name, {}) if isinstance(target, dict) else target[_index(target, name, path)]
        if target is None:
            raise NoPlace(path, f"'{name}' is null, which has no parts")
    if isinstance(target, dict):
        target[last] = value
    else:
        target[_index(target, last, path)] = value


def _index(target: Any, name: str, path: str) -> int:
    if not isinstance(target, list):
        raise NoPlace(path, f"'{name}' would be a part of {_text(target)}, which has none")
    if not name.isdecimal() or int(name) >= len(target):
        raise NoPlace(path, f"'{name}' is no position in a list of {len(target)}, counted from 0")
    return int(name)
