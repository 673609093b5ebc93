"""Climbs the ladder with planted defects, for the tests of detectors."""

from __future__ import annotations

from service.compilation.judgement import Result
from service.compilation.run.observation import Observation
from service.compilation.rungs import Backend, Rung


def verdicts(results: list[Result]) -> list[str]:
    return [result.verdict for result in results]


def seen(result: Result) -> Observation:
    assert result.observation is not None
    return result.observation


def messages(result: Result) -> str:
    return "\n".join(finding.message for finding in result.findings)


def planted(backend: Backend) -> Rung:
    return Rung("planted", backend)
