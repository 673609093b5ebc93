"""Runs the harness on loops with a planted mistake in their use of CUDA graphs, and on loops without one.

    python benchmarks/planted.py [NAME …]

With a CUDA device they climb to CUDA graphs and fail on real replays; without one they are rehearsed. A line
per loop: whether the finding is the planted mistake, the verdict, and the findings. Exit 1 unless all are as expected.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from programs import storing
from programs.registry import CLEAN, DEFECTS, Planted

from service.compilation.judgement import Result
from service.compilation.ladder import climb
from service.compilation.run.run_plan import plan_run
from service.compilation.rungs import RUNGS
from service.jobs.spec.compile import Tolerance

STEPS = 8


def main(names: list[str]) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "no CUDA device: rehearsed, not replayed"
    print(f"torch {torch.__version__}, {where}")
    every = [*CLEAN, *DEFECTS, *storing.INNOCENT, *(each for each in storing.DEFECTS if _is_replayed(each, device))]
    chosen = [planted for planted in every if not names or planted.name in names]
    right = [report(planted, device) for planted in chosen]
    print(f"{sum(right)} of {len(right)} as expected")
    return 0 if right and all(right) else 1


def _is_replayed(planted: Planted, device: torch.device) -> bool:
    """A module whose list grows is compiled anew in each step, so that no CUDA graph of it is ever replayed."""
    return device.type != "cuda" or planted.make is not storing.Appending


def report(planted: Planted, device: torch.device) -> bool:
    began = time.perf_counter()
    result = climbed(planted, device)
    right = as_expected(planted, result)
    verdict = result.verdict if device.type == "cuda" else "rehearsed"
    seconds = time.perf_counter() - began
    print(
        f"{'ok   ' if right else 'WRONG'} {planted.name:26} expected {planted.verdict:13} {verdict:13} {seconds:5.1f} s"
    )
    for finding in result.findings:
        if finding.verdict != "not_applicable":
            print(f"        {finding.verdict}: {finding.message}")
    return right


def climbed(planted: Planted, device: torch.device) -> Result:
    """The result on CUDA graphs, with all rungs below it where they apply."""
    program = planted.program(device)
    rungs = [RUNGS["inductor"], RUNGS["reduce-overhead"]] if device.type == "cuda" else [RUNGS["reduce-overhead"]]
    plan = plan_run(program, STEPS, Tolerance(), lambda seconds: seconds)
    return list(climb(program, rungs, [planted.phase], plan))[-1]


def as_expected(planted: Planted, result: Result) -> bool:
    found = [finding for finding in result.findings if finding.verdict != "not_applicable"]
    if planted.verdict == "pass":
        return not found and result.verdict in {"pass", "not_applicable"}
    named = [finding for finding in found if finding.verdict == planted.verdict]
    return any(all(words in finding.message for words in planted.words) for finding in named)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
