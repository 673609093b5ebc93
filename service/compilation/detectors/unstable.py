"""Still compiling when every input shape has been seen: such a job never reaches its speed."""

from __future__ import annotations

from collections.abc import Iterator

from service.compilation.evidence import Recompile
from service.compilation.observation import Observation
from service.compilation.verdicts import Finding


def detect(observation: Observation) -> Iterator[Finding]:
    late = observation.evidence.late
    if not late:
        return
    cause = _cause(observation.evidence.recompiles, late)
    yield Finding("unstable", f"still compiling after warm-up, in {len(late)} iterations from {late[0]} on{cause}")


def _cause(recompiles: tuple[Recompile, ...], late: tuple[int, ...]) -> str:
    found = next((recompile for recompile in recompiles if recompile.iteration in late), None)
    return f": {found.guard} ({found.function}, {found.file}:{found.line})" if found else ""
