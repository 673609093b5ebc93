"""Defines sweeps: which fields of a spec take which values."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from service.jobs.spec.common.stopping import AnyRule
from service.jobs.spec.common.strict import Recorded, Strict, disagreement

MOST_SWEPT = 1000
"""The most jobs of one sweep."""
_FORMS = ("grid", "zip", "list", "random")
FIXED = ("kind", "sweep")
"""Fields that cannot be swept: all jobs of a sweep share them."""

_Path = Annotated[str, StringConstraints(min_length=1, max_length=200)]
_Values = Annotated[list[Recorded], Field(min_length=1, max_length=MOST_SWEPT)]
_Axes = Annotated[dict[_Path, _Values], Field(min_length=1, max_length=16)]
_Points = Annotated[
    list[Annotated[dict[_Path, Recorded], Field(min_length=1, max_length=64)]],
    Field(min_length=1, max_length=MOST_SWEPT),
]


class Best(Strict):
    """Asks which job of a sweep did best by a number of its result."""

    metric: str = Field(min_length=1, max_length=200, description="path in a result, such as eval_accuracy")
    mode: Literal["min", "max"] = Field(description="whether the least or the greatest value is best")


class RangeSpec(Strict):
    """Numbers from ``low`` to ``high``, each as likely as any other."""

    low: float = Field(description="the least number")
    high: float = Field(description="the greatest number")
    log: bool = Field(False, description="whether logarithms are drawn evenly, as suits a learning rate")
    whole: bool = Field(False, description="whether only whole numbers are drawn")

    @model_validator(mode="after")
    def _is_a_range(self) -> RangeSpec:
        if self.low >= self.high:
            raise disagreement("high", f"low is {self.low:g}", self.high, f"more than {self.low:g}")
        if self.log and self.low <= 0:
            raise disagreement("low", "log=true takes its logarithm", self.low, "more than 0")
        if self.whole and not (self.low.is_integer() and self.high.is_integer()):
            raise disagreement("whole", "low and high are drawn, too", True, "whole low and high")
        return self


class RandomSpec(Strict):
    """Draws the values of each job by a seed: the same spec gives the same jobs."""

    fields: Annotated[dict[_Path, RangeSpec | _Values], Field(min_length=1, max_length=16)] = Field(
        description="by dotted path of a field, a range of numbers or a list of values"
    )
    jobs: int = Field(ge=1, le=MOST_SWEPT, description="number of jobs")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of the draws")


class SweepSpec(Strict):
    """Values of a spec's fields, by dotted path (``optimizer.lr``): each combination is a job.

    ``grid`` combines every value of a field with every value of the others, ``zip`` the first values of all
    fields, then the second ones; ``list`` names the values of each job, and ``random`` draws them.
    """

    grid: _Axes | None = Field(None, description="values by dotted path of a field; a job for each combination")
    zip: _Axes | None = Field(None, description="values by dotted path, as many of each; the jobs take them together")
    list: _Points | None = Field(None, description="fields and values of each job")
    random: RandomSpec | None = Field(None, description="ranges or values from which each job's are drawn")
    best: Best | None = Field(None, description="which result makes a job the best of the sweep")
    stop: AnyRule | None = Field(None, description="the rule by which jobs that do worse than others are stopped early")

    @property
    def form(self) -> str:
        """Return the field that holds the values."""
        return next(name for name in _FORMS if getattr(self, name) is not None)

    @property
    def jobs(self) -> int:
        if self.random is not None:
            return self.random.jobs
        if self.grid is not None:
            return math.prod(map(len, self.grid.values()))
        return len(self.list if self.list is not None else next(iter((self.zip or {"": []}).values())))

    @model_validator(mode="after")
    def _one_form(self) -> SweepSpec:
        given = [name for name in _FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            raise disagreement(
                "grid", f"{' and '.join(given) or 'none'} is given", None, "one of grid, zip, list and random"
            )
        return self

    @model_validator(mode="after")
    def _zips(self) -> SweepSpec:
        lengths = {path: len(values) for path, values in (self.zip or {}).items()}
        for path, length in lengths.items():
            first = next(iter(lengths))
            if length != lengths[first]:
                message = f"it has {length} values, and {first} has {lengths[first]}"
                raise disagreement(f"zip.{path}", message, length, f"{lengths[first]} values")
        return self

    @model_validator(mode="after")
    def _not_too_many(self) -> SweepSpec:
        if (count := self.jobs) > MOST_SWEPT:
            raise disagreement("grid", f"it makes {count} jobs", count, f"at most {MOST_SWEPT}")
        if self.stop is not None and count < (least := self.stop.least_jobs):
            message = f"the sweep makes {count} jobs, and its rule {self.stop.rule} stops none of fewer than {least}"
            raise disagreement("stop", message, count, f"{least} jobs or more, or no rule")
        return self

    @model_validator(mode="after")
    def _apart(self) -> SweepSpec:
        for path, place in self.places().items():
            around = next((other for other in self.places() if path.startswith(f"{other}.")), None)
            if path.partition(".")[0] in FIXED:
                raise disagreement(place, "all jobs of a sweep share it", path, "another field")
            if around is not None and self.form != "list":
                raise disagreement(place, f"it lies within {around}, which is swept too", path, "fields apart")
        return self

    def places(self) -> dict[str, str]:
        """Return the place at which each swept field is first named, by its path."""
        if self.random is not None:
            return {path: f"random.fields.{path}" for path in self.random.fields}
        if self.list is None:
            return {path: f"{self.form}.{path}" for path in (self.grid or self.zip or {})}
        return {path: f"list.{index}.{path}" for index in reversed(range(len(self.list))) for path in self.list[index]}
