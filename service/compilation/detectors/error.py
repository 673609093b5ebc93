"""Reports a rung that raised."""

from __future__ import annotations

from collections.abc import Iterator

from service.compilation.run.observation import Observation
from service.compilation.verdicts import Finding


def detect(observation: Observation) -> Iterator[Finding]:
    if observation.error:
        yield Finding("fail_error", observation.error)
