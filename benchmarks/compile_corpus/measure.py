"""Measures a program of the corpus: in plain torch, and through the check."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.compile_corpus.programs import CorpusProgram, Entry
from service.compilation.instruments.toolchain import Toolchain
from service.compilation.judgement import Result
from service.compilation.ladder import climb
from service.compilation.prepare import start_toolchain
from service.compilation.program import Step
from service.compilation.run.run_plan import plan_run
from service.compilation.run.timing import RaceSettings
from service.compilation.rungs import LADDER, RUNGS, Rung
from service.models.randomness import drawn, seed_all
from service.parallel.boundary import StepBoundary

STEPS = 8
OFF, OFF_BF16 = 2e-3, 5e-2
"""The error, relative to its size, that a result may have in plain torch."""
_NOT_RUN = "the uncompiled model does not run"
_WARM: set[str] = set()
_KEPT = Path(tempfile.gettempdir(), f"trivet-corpus-{os.getuid()}")
"""The folder of facts about the compiler that processes share, like jobs of one owner."""


def measured(entry: Entry, device: str, *, fast: bool = False, without: str = "") -> dict[str, Any]:
    """Return a row: the fault that ``shows`` in plain torch, the finding that ``stopped`` the check, both empty
    without one; seconds.
    """
    torch.set_num_threads(1)
    program = entry.program(torch.device(device))
    row: dict[str, Any] = {"name": entry.name}
    if not fast and device not in _WARM:
        start_toolchain(Toolchain(program.device, _KEPT), LADDER)
        _WARM.add(device)
    with entry.before():
        if without != "plain":
            began = time.perf_counter()
            row |= {"shows": shown(program, fast=fast), "plain_s": round(time.perf_counter() - began, 2)}
        if without != "check":
            rungs = _few_rungs(entry) if fast else LADDER
            began = time.perf_counter()
            plan = plan_run(program, 4, entry.tolerance, float)
            plan = replace(plan, race=RaceSettings(block_s=1e-3, budget_s=1e-3)) if fast else plan
            results = list(climb(program, rungs, [entry.phase], plan))
            row |= {"stopped": stopped(results), "check_s": round(time.perf_counter() - began, 2)}
            row["rungs"] = {result.case.rung.name: result.verdict for result in results}
    return row


def _few_rungs(entry: Entry) -> tuple[Rung, ...]:
    """Return the rungs of a fast check, on a CPU: the one that shows the bug; for a sound program the second one, which
    captures all that the first one does, and the last one, which is only rehearsed there.
    """
    return (RUNGS[entry.rung],) if entry.bug else (LADDER[1], LADDER[-1])


def stopped(results: list[Result]) -> str:
    """Return the check's findings against the program, empty if it passes wherever it applies.

    Raises ``ValueError`` for one that does not even run uncompiled: it says nothing about the check.
    """
    for result in results:
        for finding in result.findings:
            if finding.message.startswith(_NOT_RUN):
                raise ValueError(finding.message)
        if result.verdict not in ("pass", "not_applicable"):
            return (
                f"{result.case.rung.name} {result.verdict}: {'; '.join(each.message for each in result.findings)[:300]}"
            )
        if result.rehearsal is not None and len(result.findings) > 1:
            return f"rehearsal {result.findings[1].verdict}: {result.findings[1].message[:300]}"
    return ""


def shown(program: CorpusProgram, *, fast: bool) -> str:
    """Return how the compiled program differs from the uncompiled one in plain torch; empty if it does not.

    A program that draws random numbers is compared with ``fallback_random``; an error that this alone causes would
    not occur in a job.
    """
    eager, draws = _run(program, None)
    backend = "aot_eager" if fast else "inductor"
    compiled, error = _tried(program, backend, fallback_random=draws)
    if error and draws:
        compiled, error = _tried(program, backend, fallback_random=False)
        compiled = compiled and eager  # other draws
    limit = OFF_BF16 if program.entry.autocast else OFF
    for number, (one, other) in enumerate(zip(eager, compiled, strict=not error)):
        for name in one:
            apart = _apart(one[name], other[name])
            if apart > limit:
                return f"{name} of step {number} is off by {apart:.2g} of its size"
    return error


def _tried(program: CorpusProgram, backend: str, *, fallback_random: bool) -> tuple[list[dict[str, Tensor]], str]:
    """Return the compiled program's results, or its error."""
    import torch._inductor.config

    try:
        with torch._inductor.config.patch(fallback_random=fallback_random):
            return _run(program, backend)[0], ""
    except Exception as error:
        return [], f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
    finally:
        torch.compiler.reset()


def _run(program: CorpusProgram, backend: str | None) -> tuple[list[dict[str, Tensor]], bool]:
    """Return the results of some steps, compiled as in a job, each with a seed of its own, and whether they
    draw random numbers.
    """
    parts = program.build(torch.float32)
    mode = "reduce-overhead" if backend == "inductor" and program.device.type == "cuda" else None
    for name in parts.compiled if backend else ():
        parts.modules[name].compile(backend=backend, mode=mode)
    steps = getattr(program, program.entry.phase)(parts, StepBoundary(parts.modules, kept=parts.kept))
    found, draws = [], False
    for number in range(STEPS):
        seed_all(number)
        fresh = drawn(program.device)
        found.append(_values(next(steps)))
        draws = draws or fresh != drawn(program.device)
    return found, draws


def _values(step: Step) -> dict[str, Tensor]:
    return {name: value.detach().double().cpu().clone() for name, value in {**step.losses, **step.outputs}.items()}


def _apart(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape or not torch.equal(one.isfinite(), other.isfinite()):
        return float("inf")
    size = float(one.nan_to_num().square().mean().sqrt()) if one.numel() else 0.0
    return float((one - other).nan_to_num().square().mean().sqrt()) / (size + 1e-12) if one.numel() else 0.0
