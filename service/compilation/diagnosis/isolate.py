"""Finds the smallest module that fails when it alone is compiled, and everything around it runs eagerly."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from service.compilation.program import Program
from service.compilation.ranks.collective_attempt import collective_attempt
from service.compilation.ranks.group import gather
from service.compilation.run.compare_runs import compare_runs
from service.compilation.run.draws import random_numbers
from service.compilation.run.observation import RungCase
from service.compilation.run.program_run import build, build_only
from service.compilation.run.reference import Reference, run
from service.compilation.run.run_rung import RunPlan, describe
from service.compilation.torch_internals.caches import empty_caches

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclass
class ModuleSearch:
    """Trials of single modules, on all ranks alike, until ``deadline`` (of ``time.monotonic``)."""

    program: Program
    case: RungCase
    reference: Reference
    plan: RunPlan
    deadline: float
    trials: int = 0
    faults: dict[str, str] = field(default_factory=dict)

    def smallest(self) -> str | None:
        """Return the path of the smallest module that fails alone; ``None`` where only several together do.

        Without time left, the smallest so far.
        """
        units = tuple(build(self.program, self.case.phase, self.case.rung).units)
        unit = next((each for each in units if self.fails(each)), None)
        while unit is not None:
            inner = next((each for each in self._children(unit) if self.fails(each)), None)
            if inner is None:
                break
            unit = inner
        return unit

    def fails(self, unit: str) -> bool:
        """Return whether compiling ``unit`` alone raises or leaves parity, on any rank."""
        if any(gather(time.monotonic() > self.deadline)):
            return False
        self.trials += 1
        own = collective_attempt(lambda: self._fault(unit), str)
        fault = next((each for each in gather(own) if each), "")
        if fault:
            self.faults[unit] = fault
        return bool(fault)

    def _fault(self, unit: str) -> str:
        with empty_caches(), random_numbers(self.case.rung, self.reference):
            try:
                program_run = build_only(self.program, self.case.phase, self.case.rung, unit)
                seen = run(program_run, self.plan.iterations, self.reference.eager.starts)
            except Exception as error:
                return describe(error)
        for each in compare_runs(seen, self.reference, self.plan.tolerance):
            if not each.passed:
                return f"{each.kind} {each.name}, iteration {each.iteration}: off by {each.max_abs:.3g}"
        return ""

    def _children(self, unit: str) -> Iterator[str]:
        """Yield the modules within that are called themselves: those in a container stand for it."""
        name, _, path = unit.partition(".")
        module = build(self.program, self.case.phase).parts.modules[name].get_submodule(path)
        yield from (f"{unit}.{child}" for child in _called(module))


def _called(module: nn.Module) -> Iterator[str]:
    for name, child in module.named_children():
        if isinstance(child, _CONTAINERS):
            yield from (f"{name}.{inner}" for inner in _called(child))
        else:
            yield name
