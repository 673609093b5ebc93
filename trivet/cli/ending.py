"""Tells how a watched job ended: what came out of it, and the command that goes on from there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from service.jobs.records import Job
from trivet.terminal import Terminal

_NEXT = MappingProxyType(
    {
        "train": "certify it: trivet submit verify.yaml --set model.job={id}   (trivet init verify writes the file)",
        "verify": "each instance: trivet bounds {id}",
        "compile": "each rung: trivet report {id}",
    }
)
_ANY_KIND = "everything that came out: trivet show {id}"
_SHOWN_ELSEWHERE = frozenset({"completed", "stopped", "data_sha256"})


def tell(job: Job, out: Terminal, err: Terminal) -> None:
    """Print the result of a job that succeeded to ``out``, the reason of any other end to ``err``."""
    if job.state == "succeeded":
        for line in result_lines(job.result or {}):
            out.print(f"  {line}")
        out.print(_NEXT.get(job.kind, _ANY_KIND).format(id=job.id))
        if command := _gated(job):
            out.print(command)
        return
    if job.error is not None:
        err.block(f"{job.error.type}: {job.error.message}", style="red", indent=2)
        err.print(f"see: trivet logs {job.id}")
    err.print(f"again, from its last checkpoint: trivet retry {job.id}")


def _gated(job: Job) -> str | None:
    """Return the command that trains with what a compile check allows, on its mesh; None where there is none."""
    gate = (job.result or {}).get("gate") if job.kind == "compile" else None
    phases = [phase for phase in ("train", "inference") if isinstance(gate, dict) and gate.get(phase)]
    if not phases:
        return None
    mesh = ", ".join(f"{name}: {size}" for name, size in job.spec["parallel"].items() if size != 1)
    asked = "".join(f"{phase}: true, " for phase in phases)
    compiled = f"--set 'compile={{{asked}gate: {job.id}}}' --set 'parallel={{{mesh}}}'"
    return f"train with it: trivet submit train.yaml {compiled}"


def result_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line per fact of a result: sentences as they are, numbers by name, counts by name in one line. What is
    nested more deeply is left to the job's report.
    """
    for name, value in result.items():
        if name in _SHOWN_ELSEWHERE:
            continue
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            yield from value
        elif isinstance(value, dict) and value and all(_is_scalar(each) for each in value.values()):
            yield f"{_words(name)}: {', '.join(f'{key} {_shown(each)}' for key, each in value.items())}"
        elif _is_scalar(value) and value is not None:
            yield f"{_words(name)}: {_shown(value)}"


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _words(name: str) -> str:
    return name.replace("_", " ")
