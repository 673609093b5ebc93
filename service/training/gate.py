"""The gate: what a compile job's report allows this training job to switch on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from service.jobs.layout import DataLayout
from service.jobs.runtime import RefusedError
from service.jobs.spec.train import CompileChoice
from service.models.compiled import COMPILE_CACHE, RECIPES, cache_file
from service.models.fingerprint import Fingerprint, difference

Phase = Literal["train", "inference"]
MODES = tuple(name for name in RECIPES if name != "eager")
"""What a job may compile in, from the least to the most that is compiled."""


class GateError(RefusedError, RuntimeError):
    """The report does not allow what the spec asks for."""


def allowed_modes(
    choice: CompileChoice, own: Sequence[Fingerprint | None], data: DataLayout, micro_batches: int = 1, stages: int = 1
) -> dict[Phase, str]:
    """The mode (a name of ``RECIPES``) for each phase that ``choice`` asks for; empty when it asks for none.

    The gate must have been written for one of the fingerprints of this job, ``own``.

    Raises :class:`GateError` when there is no report, when it was written for another configuration (naming the
    fields), when a phase did not pass, or when CUDA graphs were checked with another pattern of ``micro_batches``,
    or on the whole model where this job runs ``stages`` of a pipeline.
    """
    asked: list[Phase] = [phase for phase in ("train", "inference") if getattr(choice, phase)]
    if not asked or choice.gate is None:
        return {}
    gate = _read(data.job(choice.gate).artifacts / "report.json", choice.gate)
    _check_fingerprint(gate, own, choice.gate)
    modes = {phase: _mode(gate, phase, choice.gate) for phase in asked}
    if RECIPES[lowest(modes)].cuda_graphs:
        _check_pattern(gate, micro_batches, choice.gate)
        _check_order(gate, stages, choice.gate)
    return modes


def lowest(modes: Mapping[Phase, str]) -> str:
    """One mode for all phases: a rung that passed has passed after all those below it."""
    return min(modes.values(), key=MODES.index)


def portable_caches(
    choice: CompileChoice, modes: Mapping[Phase, str], data: DataLayout, rank: int, digests: Mapping[str, str]
) -> list[bytes]:
    """What the compile job compiled on this rank in the mode that is used, so that it need not be compiled again.

    To load it is to run it, so only content whose SHA-256 is in ``digests``, by artifact name, is returned.
    """
    if choice.gate is None or not modes:
        return []
    names = [f"{COMPILE_CACHE}/{cache_file(phase, lowest(modes), rank)}" for phase in modes]
    folder = data.job(choice.gate).artifacts
    contents = {name: (folder / name).read_bytes() for name in names if name in digests and (folder / name).exists()}
    return [content for name, content in contents.items() if hashlib.sha256(content).hexdigest() == digests[name]]


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


def _check_fingerprint(gate: Mapping[str, Any], own: Sequence[Fingerprint | None], job: str) -> None:
    """Told are the differences from the nearest of ``own``."""
    differing = min((difference(gate["fingerprint"], each) for each in own if each is not None), key=len)
    if differing:
        fields = "; ".join(
            f"{field} is {mine!r} here and {theirs!r} in the report" for field, theirs, mine in differing
        )
        raise GateError(f"compile.gate: {job} was run for another configuration: {fields}")


def _check_pattern(gate: Mapping[str, Any], micro_batches: int, job: str) -> None:
    """What CUDA graphs overwrite depends on how often a step runs forward."""
    checked = gate.get("micro_batches", 1)
    if (checked > 1) != (micro_batches > 1):
        raise GateError(
            f"compile.gate: {job} checked CUDA graphs with {checked} forwards per step, here are {micro_batches}; "
            f"check with micro_batches of {micro_batches}"
        )


def _check_order(gate: Mapping[str, Any], stages: int, job: str) -> None:
    """And on what runs between a forward and its backward: nothing in one piece, other forwards in a pipeline."""
    if stages > 1 and gate["fingerprint"].get("parallel.pp", 1) == 1:
        raise GateError(
            f"compile.gate: {job} checked CUDA graphs on a model in one piece, here are {stages} stages, whose "
            "forwards wait for their backwards; check with this job's parallel.pp, or up to inductor in its modes"
        )


def _mode(gate: Mapping[str, Any], phase: Phase, job: str) -> str:
    rung = gate.get(phase)
    if rung not in MODES:
        raise GateError(
            f"compile.{phase}: the gate of {job} allows {rung or 'nothing'} for this phase{_why(gate)}; "
            f"expected {' or '.join(MODES)}"
        )
    return str(rung)


def _why(gate: Mapping[str, Any]) -> str:
    return f" ({gate['closed']})" if gate.get("closed") else ""
