"""The gate: what a compile job's report allows this training job to switch on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from service.jobs.layout import DataLayout
from service.jobs.spec.train import CompileChoice
from service.models.fingerprint import Fingerprint, difference

Phase = Literal["train", "inference"]
BACKENDS = ("aot_eager", "inductor")


class GateError(RuntimeError):
    """The report does not allow what the spec asks for."""


def allowed_backends(choice: CompileChoice, own: Fingerprint, data: DataLayout) -> dict[Phase, str]:
    """The backend of ``torch.compile`` for each phase that ``choice`` asks for; empty when it asks for none.

    Raises :class:`GateError` when there is no report, when it was written for another configuration (naming the
    fields), or when a phase did not pass.
    """
    asked: list[Phase] = [phase for phase in ("train", "inference") if getattr(choice, phase)]
    if not asked or choice.gate is None:
        return {}
    gate = _read(data.job(choice.gate).artifacts / "report.json", choice.gate)
    _check_fingerprint(gate, own, choice.gate)
    return {phase: _backend(gate, phase, choice.gate) for phase in asked}


def _read(path: Path, job: str) -> Mapping[str, Any]:
    try:
        gate = json.loads(path.read_bytes())["gate"]
    except OSError as error:
        raise GateError(f"compile.gate: {job} has published no report.json ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise GateError(f"compile.gate: the report of {job} holds no gate: {error}") from error
    if not isinstance(gate, dict) or not isinstance(gate.get("fingerprint"), dict):
        raise GateError(f"compile.gate: the report of {job} holds no gate with a fingerprint")
    return gate


def _check_fingerprint(gate: Mapping[str, Any], own: Fingerprint, job: str) -> None:
    differing = difference(gate["fingerprint"], own)
    if differing:
        fields = "; ".join(
            f"{field} is {mine!r} here and {theirs!r} in the report" for field, theirs, mine in differing
        )
        raise GateError(f"compile.gate: {job} was run for another configuration: {fields}")


def _backend(gate: Mapping[str, Any], phase: Phase, job: str) -> str:
    rung = gate.get(phase)
    if rung not in BACKENDS:
        raise GateError(
            f"compile.{phase}: the gate of {job} allows {rung or 'nothing'} for this phase; "
            f"expected {' or '.join(BACKENDS)}"
        )
    return str(rung)
