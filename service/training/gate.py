"""Decides the compile modes of this training job by a compile job's gate, and loads the code that job kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from service.jobs.files import DataLayout
from service.jobs.runtime import RefusedError, RunContext
from service.jobs.spec.arithmetic import CompileChoice
from service.jobs.spec.compile import Phase
from service.models.compiled import COMPILE_CACHE, COMPILE_MODES, cache_file, load_portable
from service.models.host_compiler import reuse_compiler
from service.models.parallelize import Fingerprint

MODES = tuple(name for name in COMPILE_MODES if name != "eager")
"""The compile modes, from the one that compiles least to the one that compiles most."""


ABSENT = "absent"


class GateError(RefusedError, RuntimeError):
    """The report does not allow the compilation that the spec asks for."""


def allowed_modes(
    choice: CompileChoice,
    accepted: Sequence[Fingerprint],
    data: DataLayout,
    micro_batches: int = 1,
    stages: int = 1,
    *,
    shape: Sequence[int] = (),
) -> dict[Phase, str]:
    """Return the mode, a name of ``COMPILE_MODES``, of each phase that ``choice`` asks for; it may ask for none.

    The gate must have been written for one of the ``accepted`` fingerprints and, for a model, for the ``shape`` of its
    input in one forward.

    Raises :class:`GateError` when there is no report, when it was written for another configuration (naming the
    fields) or shape, when a phase did not pass, or when CUDA graphs were checked with another pattern of
    ``micro_batches``, or on the whole model where this job runs ``stages`` of a pipeline.
    """
    phases: list[Phase] = [phase for phase in ("train", "inference") if getattr(choice, phase)]
    if not phases or choice.gate is None:
        return {}
    gate = _read_gate(data.job(choice.gate).artifacts / "report.json", choice.gate)
    _check_fingerprint(gate, accepted, choice.gate)
    if shape:
        _check_shape(gate, shape, choice.gate)
    modes = {phase: _mode_of_phase(gate, phase, choice.gate) for phase in phases}
    if COMPILE_MODES[lowest_mode(modes)].cuda_graphs:
        _check_micro_batches(gate, micro_batches, choice.gate)
        _check_stages(gate, stages, choice.gate)
    return modes


def lowest_mode(modes: Mapping[Phase, str]) -> str:
    """Return the lower mode for all phases: a passed rung implies that those below it passed."""
    return min(modes.values(), key=MODES.index)


def checked_calls(choice: CompileChoice, modes: Mapping[Phase, str], data: DataLayout) -> dict[Phase, list[Any]]:
    """Return the calls of compiled modules, for each opened phase, that the gate's job saw in the mode in use: rows of
    ``invocations`` in its report. Raises :class:`GateError` for a report without them.
    """
    if not modes or choice.gate is None:
        return {}
    report = json.loads((data.job(choice.gate).artifacts / "report.json").read_bytes())
    rows = {(row["phase"], row["rung"]): row["invocations"] for row in report.get("rungs", ())}
    lowest = lowest_mode(modes)
    for phase in modes:
        if not rows.get((phase, lowest)):
            raise GateError(f"compile.{phase}: the report of {choice.gate} has no calls of the rung {lowest}")
    return {phase: rows[phase, lowest] for phase in modes}


def load_caches(choice: CompileChoice, modes: Mapping[Phase, str], context: RunContext) -> None:
    """Load the code that the gate's job compiled, instead of compiling it; every rank logs whether it could."""
    if not modes:
        return
    if context.device_type == "cpu" and COMPILE_MODES[lowest_mode(modes)].backend == "inductor":
        reuse_compiler()
    code = f"rank {context.rank}: compiled code of {choice.gate}"
    caches = portable_caches(choice, modes, context.data, context.rank, context.gate_artifacts)
    if not caches:
        mode = lowest_mode(modes)
        context.report.log(
            f"{code} not usable: none was kept for this rank in {mode} by a job of the same owner, or it was changed"
        )
        return
    loaded = [load_portable(cache) for cache in caches]
    context.report.log(f"{code} {'loaded' if all(loaded) else 'not usable: it is damaged, and compiled again'}")


def portable_caches(
    choice: CompileChoice, modes: Mapping[Phase, str], data: DataLayout, rank: int, digests: Mapping[str, str]
) -> list[bytes]:
    """Return the code that the compile job made on this rank in the mode in use.

    Loading code runs it, so only content whose SHA-256 is in ``digests``, by artifact name, is returned.
    """
    if choice.gate is None or not modes:
        return []
    names = [f"{COMPILE_CACHE}/{cache_file(phase, lowest_mode(modes), rank)}" for phase in modes]
    folder = data.job(choice.gate).artifacts
    contents = {name: (folder / name).read_bytes() for name in names if name in digests and (folder / name).exists()}
    return [content for name, content in contents.items() if hashlib.sha256(content).hexdigest() == digests[name]]


def _read_gate(path: Path, job: str) -> Mapping[str, Any]:
    try:
        gate = json.loads(path.read_bytes())["gate"]
    except OSError as error:
        raise GateError(f"compile.gate: {job} has published no report.json ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise GateError(f"compile.gate: the report of {job} holds no gate: {error}") from error
    if not isinstance(gate, dict) or not isinstance(gate.get("fingerprint"), dict):
        raise GateError(f"compile.gate: the report of {job} holds no gate with a fingerprint")
    return gate


def _check_fingerprint(gate: Mapping[str, Any], accepted: Sequence[Fingerprint], job: str) -> None:
    """Raise :class:`GateError` with the differences from the nearest of ``accepted``, unless one is the gate's."""
    differing = min((difference(gate["fingerprint"], own) for own in accepted), key=len)
    if differing:
        fields = "; ".join(
            f"{field} is {mine!r} here and {theirs!r} in the report" for field, theirs, mine in differing
        )
        raise GateError(f"compile.gate: {job} was run for another configuration: {fields}")


def difference(recorded: Fingerprint, own: Fingerprint) -> list[tuple[str, str | int | float, str | int | float]]:
    """Return the fields that differ, as ``(field, recorded, own)`` by name; a missing one counts as ``absent``."""
    names = sorted(recorded.keys() | own.keys())
    pairs = ((name, recorded.get(name, ABSENT), own.get(name, ABSENT)) for name in names)
    return [pair for pair in pairs if pair[1] != pair[2]]


def _check_shape(gate: Mapping[str, Any], shape: Sequence[int], job: str) -> None:
    """Raise :class:`GateError` for an input of another shape: code is compiled for each, and a size may change it."""
    checked = gate.get("shapes", [])
    if list(shape) not in checked:
        seen = " or ".join(map(str, checked)) or "no shape that its report names"
        raise GateError(
            f"compile.gate: {job} checked forwards over inputs of {seen}, and here they are {list(shape)}; check with "
            f"this job's data, and shapes of [{shape[0]}]"
        )


def _check_micro_batches(gate: Mapping[str, Any], micro_batches: int, job: str) -> None:
    """Raise :class:`GateError` for another pattern of forwards: it decides what CUDA graphs overwrite."""
    checked = gate.get("micro_batches", 1)
    if (checked > 1) != (micro_batches > 1):
        raise GateError(
            f"compile.gate: {job} checked CUDA graphs with {checked} forwards per step, here are {micro_batches}; "
            f"check with micro_batches of {micro_batches}"
        )


def _check_stages(gate: Mapping[str, Any], stages: int, job: str) -> None:
    """Raise :class:`GateError` for ``stages`` of a pipeline whose gate was written for the model in one piece.

    There each backward follows its forward at once. In a pipeline other forwards run in between, and a CUDA graph's
    replay may overwrite what a backward still needs.
    """
    if stages > 1 and gate["fingerprint"].get("parallel.pp", 1) == 1:
        raise GateError(
            f"compile.gate: {job} checked CUDA graphs on a model in one piece, here are {stages} stages, whose "
            "forwards wait for their backwards; check with this job's parallel.pp, or up to inductor in its modes"
        )


def _mode_of_phase(gate: Mapping[str, Any], phase: Phase, job: str) -> str:
    rung = gate.get(phase)
    if rung not in MODES:
        why = f" ({gate['closed']})" if gate.get("closed") else ""
        raise GateError(
            f"compile.{phase}: the gate of {job} allows {rung or 'nothing'} for this phase{why}; "
            f"expected {' or '.join(MODES)}"
        )
    return str(rung)
