"""Reports stale memory that parity cannot show: a tensor is the same in every iteration, and no audit proves it new."""

from __future__ import annotations

from collections.abc import Iterator

from service.compilation.run.notes import names_of
from service.compilation.run.observation import Observation
from service.compilation.verdicts import Finding

_PROOF = "inputs that change from step to step would show whether it is"


def detect(observation: Observation) -> Iterator[Finding]:
    """Yield one finding at most: memory that is read after a replay began, or that may be."""
    audit = observation.audit
    if not observation.case.rung.overwrites or observation.error:
        return
    if audit.read:
        yield Finding("fail_lifetime", f"something held over a replay is read: with shuffled parameters {audit.read}")
    elif audit.problem:
        where = f"{names_of(audit.unseen)}, the same in every iteration"
        why = f"it is not proved that none is read ({audit.problem})"
        yield Finding("vacuous", f"stale memory could not be seen in {where}, and {why}; {_PROOF}")
