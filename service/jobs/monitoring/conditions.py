"""Writes conditions on metrics once, as Prometheus' query and as a computation over remembered numbers.

A value is a number for each set of labels; a condition keeps those beyond a limit, as in Prometheus. Several API
processes export the same series, and one instance is enough: queries say ``max without (instance)``.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from service.jobs.monitoring.numbers import Numbers

Labels = tuple[tuple[str, str], ...]
Values = dict[Labels, float]


@dataclass(frozen=True)
class Moment:
    """The numbers of one time, in Unix seconds."""

    at: float
    numbers: Numbers


History = Sequence[Moment]
"""Moments in order of time; conditions are about the last one."""


class MetricQuery(ABC):
    """A query of Prometheus that is also computed here. A comparison answers with the values that it keeps."""

    @property
    @abstractmethod
    def promql(self) -> str:
        """Return the query."""

    @property
    def metrics(self) -> frozenset[str]:
        """Return the names of the series that it reads, by default those of its parts."""
        return frozenset[str]().union(*(part.metrics for part in vars(self).values() if isinstance(part, MetricQuery)))

    @abstractmethod
    def of(self, history: History) -> Values:
        """Return the answer at the last moment."""


@dataclass(frozen=True)
class _OfSeries(MetricQuery):
    """Reads the series of one metric."""

    name: str

    @property
    def metrics(self) -> frozenset[str]:
        return frozenset({self.name})


@dataclass(frozen=True)
class Latest(_OfSeries):
    """The newest value of a metric with these labels, for each set of its other labels."""

    labels: Labels = ()

    @property
    def promql(self) -> str:
        return f"max without (instance) ({_selector(self.name, self.labels)})"

    def of(self, history: History) -> Values:
        return _selected(history[-1].numbers, self.name, self.labels) if history else {}


@dataclass(frozen=True)
class Increase(_OfSeries):
    """How much a counter grew within a window, in seconds, over all its label sets.

    A series that appears in the window has grown from 0; one that fell was restarted.
    """

    window_s: int
    labels: Labels = ()

    @property
    def promql(self) -> str:
        grown = f"increase({_selector(self.name, self.labels)}[{self.window_s}s])"
        return f"sum(max without (instance) ({grown}))"

    def of(self, history: History) -> Values:
        if not history:
            return {}
        seen = [moment for moment in history if moment.at >= history[-1].at - self.window_s]
        totals = [sum(_selected(moment.numbers, self.name, self.labels).values()) for moment in seen]
        steps = (new - old if new >= old else new for old, new in itertools.pairwise(totals))
        return {(): sum(steps)}


@dataclass(frozen=True)
class Ratio(MetricQuery):
    """One value divided by another that has no labels of its own; nothing if that is 0."""

    dividend: MetricQuery
    divisor: MetricQuery

    @property
    def promql(self) -> str:
        return f"{self.dividend.promql} / {self.divisor.promql}"

    def of(self, history: History) -> Values:
        divisor = self.divisor.of(history).get((), 0.0)
        return {labels: value / divisor for labels, value in self.dividend.of(history).items()} if divisor else {}


@dataclass(frozen=True)
class Total(MetricQuery):
    """The sum of all values with these labels."""

    of_each: MetricQuery

    @property
    def promql(self) -> str:
        return f"sum({self.of_each.promql})"

    def of(self, history: History) -> Values:
        values = self.of_each.of(history)
        return {(): sum(values.values())} if values else {}


@dataclass(frozen=True)
class Magnitude(MetricQuery):
    """Each value without its sign."""

    of_each: MetricQuery

    @property
    def promql(self) -> str:
        return f"abs({self.of_each.promql})"

    def of(self, history: History) -> Values:
        return {labels: abs(value) for labels, value in self.of_each.of(history).items()}


class Condition(MetricQuery):
    """Keeps the values of the label sets for which something holds."""


@dataclass(frozen=True)
class Compared(Condition):
    """Keeps the values above, or below, a limit."""

    value: MetricQuery
    relation: Literal[">", "<"]
    limit: float

    @property
    def promql(self) -> str:
        return f"{self.value.promql} {self.relation} {self.limit:g}"

    def of(self, history: History) -> Values:
        values = self.value.of(history)
        above = self.relation == ">"
        return {
            labels: value for labels, value in values.items() if (value > self.limit) == above and value != self.limit
        }


@dataclass(frozen=True)
class Both(Condition):
    """Keeps the values of the first while the second keeps any."""

    first: Condition
    second: Condition

    @property
    def promql(self) -> str:
        return f"({self.first.promql}) and on () ({self.second.promql})"

    def of(self, history: History) -> Values:
        return self.first.of(history) if self.second.of(history) else {}


@dataclass(frozen=True)
class ServiceUnreachable(Condition):
    """No process answers a scrape. Only Prometheus can see this: a process that computes it is running."""

    @property
    def promql(self) -> str:
        return 'up{job="trivet"} == 0'

    def of(self, history: History) -> Values:
        return {}


def _selector(name: str, labels: Labels) -> str:
    matchers = ",".join(
        f'{label}=~"{pattern}"' if "|" in pattern else f'{label}="{pattern}"' for label, pattern in labels
    )
    return f"{name}{{{matchers}}}" if matchers else name


def _selected(numbers: Numbers, name: str, wanted: Labels) -> Values:
    return {
        series.labels: value
        for series, value in numbers.items()
        if series.name == name
        and all(dict(series.labels).get(label) in pattern.split("|") for label, pattern in wanted)
    }
