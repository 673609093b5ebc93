"""Defines the learning-rate schedules, built in or from installed packages, and when a training ends early."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import BeforeValidator, Field, StringConstraints

from service.jobs.plugins import Better, Evaluation, Reason, ScheduleConfig, ScheduleKind, Strict
from service.jobs.plugins.catalogue import catalogue

MetricName = Annotated[str, StringConstraints(pattern="^eval_[a-z0-9_]+$", max_length=100)]
_MODE = "whether the least or the greatest value is the best"


class _StepsField(Protocol):
    """The fields of a ``TrainSpec`` that schedules here ask for."""

    @property
    def steps(self) -> int: ...


def _values(evaluations: Sequence[Evaluation], metric: str) -> list[float]:
    return [each.metrics[metric] for each in evaluations if metric in each.metrics]


class ConstantRate(ScheduleConfig):
    """Stays at the peak."""

    decay: Literal["constant"] = Field("constant", description="no decay")

    def decayed(self, step: int, steps: int, evaluations: Sequence[Evaluation]) -> float:
        return 1.0


class _ToTheEnd(ScheduleConfig):
    """Falls from the warmup's end to ``floor`` at the last step."""

    floor: float = Field(0.1, ge=0, le=1, description="where it ends, as a share of lr")

    def _between(self, weight: float) -> float:
        """Return the point between floor, at 0, and peak, at 1."""
        return self.floor + (1 - self.floor) * weight

    def _progress(self, step: int, steps: int) -> float:
        span = steps - 1 - self.warmup
        return (step - self.warmup) / span if span > 0 else float(self.warmup > 0)  # an only step is at the peak


class CosineDecay(_ToTheEnd):
    """Half a cosine from the peak to the floor (Loshchilov & Hutter, 2017)."""

    decay: Literal["cosine"] = Field("cosine", description="half a cosine, to the last step")

    def decayed(self, step: int, steps: int, evaluations: Sequence[Evaluation]) -> float:
        return self._between(0.5 * (1 + math.cos(math.pi * self._progress(step, steps))))


class LinearDecay(_ToTheEnd):
    """A straight line from the peak to the floor."""

    decay: Literal["linear"] = Field("linear", description="a straight line, to the last step")

    def decayed(self, step: int, steps: int, evaluations: Sequence[Evaluation]) -> float:
        return self._between(1 - self._progress(step, steps))


class WsdDecay(_ToTheEnd):
    """Warmup, a stable rate, and a straight line to the floor over the last steps (Hu et al., 2024)."""

    decay: Literal["wsd"] = Field("wsd", description="stable, then a straight line over the last steps")
    last: int = Field(ge=1, description="steps of the decay; the last of them is at the floor")

    def decayed(self, step: int, steps: int, evaluations: Sequence[Evaluation]) -> float:
        return self._between(min((steps - 1 - step) / self.last, 1.0))

    def check(self, spec: _StepsField) -> list[Reason]:
        most = spec.steps - self.warmup
        if self.last <= most or most < 0:
            return super().check(spec)
        message = f"warmup={self.warmup} and the decay do not fit into steps={spec.steps}"
        return [("schedule.last", message, self.last, f"at most {most}")]


class StepDecay(ScheduleConfig):
    """Is multiplied by ``gamma`` after every so many steps, counted from the first, as by ``StepLR`` of torch."""

    decay: Literal["step"] = Field("step", description="a factor after every so many steps")
    every: int = Field(ge=1, description="steps between two reductions")
    gamma: float = Field(0.1, gt=0, le=1, description="the factor")

    def decayed(self, step: int, steps: int, evaluations: Sequence[Evaluation]) -> float:
        return self.gamma ** (step // self.every)


class PlateauDecay(ScheduleConfig):
    """Is multiplied by ``gamma`` once more than ``patience`` evaluations in a row were no better than the best by
    ``threshold``, relatively, as by ``ReduceLROnPlateau`` of torch.
    """

    decay: Literal["plateau"] = Field("plateau", description="a factor whenever evaluations get no better")
    metric: MetricName = Field("eval_loss", description="the metric of evaluations that it follows")
    mode: Better = Field("min", description=_MODE)
    gamma: float = Field(0.1, gt=0, lt=1, description="the factor")
    patience: int = Field(10, ge=0, description="evaluations in a row that may be no better")
    threshold: float = Field(1e-4, ge=0, lt=1, description="the share by which a better one must differ")
    floor: float = Field(0.0, ge=0, le=1, description="the least rate, as a share of lr")

    @property
    def follows(self) -> Mapping[str, Better]:
        return {self.metric: self.mode}

    def decayed(self, step: int, steps: int, evaluations: Sequence[Evaluation]) -> float:
        best, waited, share = math.inf if self.mode == "min" else -math.inf, 0, 1.0
        for value in _values(evaluations, self.metric):
            if self._is_better(value, best):
                best, waited = value, 0
            else:
                waited += 1
            if waited > self.patience:
                share, waited = max(share * self.gamma, self.floor), 0
        return share

    def _is_better(self, value: float, best: float) -> bool:
        if self.mode == "min":
            return value < best * (1 - self.threshold)
        return value > best * (1 + self.threshold)


SCHEDULES = catalogue(
    ScheduleKind,
    tuple(ScheduleKind(each) for each in (ConstantRate, CosineDecay, LinearDecay, StepDecay, WsdDecay, PlateauDecay)),
    default="cosine",
)


def _without_floor(value: Any) -> Any:
    """Read a constant rate with the floor of a cosine: specs were written out so, and the floor meant nothing."""
    if isinstance(value, Mapping) and value.get("decay") == "constant":
        return {name: each for name, each in value.items() if name != "floor"}
    return value


if TYPE_CHECKING:
    ScheduleSpec = ScheduleConfig
else:
    ScheduleSpec = SCHEDULES.choice(BeforeValidator(_without_floor), BeforeValidator(SCHEDULES.read_name))


class PatienceSpec(Strict):
    """How long a metric may get no better."""

    patience: int = Field(ge=1, description="evaluations in a row that are no better, after which training ends")
    mode: Better = Field("min", description=_MODE)
    delta: float = Field(0.0, ge=0, description="the difference by which a better one must differ")

    def waited(self, values: Sequence[float]) -> tuple[int, float]:
        """Return the number of values since the best, and the best; ``values`` are one or more, oldest first."""
        sign = 1 if self.mode == "min" else -1
        at = 0
        for index, value in enumerate(values):
            if sign * value < sign * values[at] - self.delta:
                at = index
        return len(values) - 1 - at, values[at]


class StopSpec(Strict):
    """Ends a training before its last step, as a success: after the evaluation that fulfils a condition."""

    when: dict[MetricName, PatienceSpec] = Field(
        min_length=1, max_length=16, description="conditions by metric of evaluations; the first that holds ends it"
    )

    @property
    def follows(self) -> Mapping[str, Better]:
        """Return the metrics that it depends on, and which end of each it takes for the better one."""
        return {metric: each.mode for metric, each in self.when.items()}

    def reason(self, evaluations: Sequence[Evaluation]) -> str | None:
        """Return why a training with these evaluations, oldest first, ends; ``None`` if it goes on."""
        for metric, condition in self.when.items():
            values = _values(evaluations, metric)
            waited, best = condition.waited(values) if values else (0, math.nan)
            if waited >= condition.patience:
                return f"{metric} is no better than {best:.6g} after {waited} more evaluations"
        return None
