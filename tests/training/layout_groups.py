"""Trainings on groups of ranks, for tests that ask for one case at a time: starting processes is what takes time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import prod
from pathlib import Path
from typing import Any

import pytest
from launching import Torchrun

Case = tuple[str, str]


def of_ranks(layouts: dict[str, dict[str, Any]], world: int) -> list[str]:
    """Name the layouts over as many ranks."""
    return [name for name, layout in layouts.items() if prod(layout["parallel"].values()) == world]


class Groups:
    """Results by case. The first case that is asked for has all others of its lane and number of ranks trained."""

    def __init__(
        self,
        folder: Path,
        torchrun: Torchrun,
        train: Callable[..., dict[str, Any]],
        ranks: dict[Case, int],
        fast: Collection[Case],
    ) -> None:
        """``train(folder, cases)`` returns the results of a group by ``"first second"``."""
        self.folder, self._torchrun, self._train = folder, torchrun, train
        self._ranks, self._fast = ranks, fast
        self._found: dict[str, Any] = {}

    def of(self, first: str, second: str) -> dict[str, Any]:
        if f"{first} {second}" not in self._found:
            self._found |= self._run((first, second))
        found: dict[str, Any] = self._found[f"{first} {second}"]
        return found

    def alone(self, first: str) -> dict[str, Any]:
        """What one process makes of it, which has no layout."""
        name = f"{first} alone"
        if name not in self._found:
            self._found |= self._train(str(self.folder), [(first, "alone")])
        found: dict[str, Any] = self._found[name]
        return found

    def expect_the_same(self, first: str, second: str, tolerance: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """Check that a layout has the losses and norms of one process; return the results of both."""
        alone, found = self.alone(first), self.of(first, second)
        for series in ("loss", "grad_norm", "eval_loss"):
            assert found[series] == pytest.approx(alone[series], rel=tolerance, abs=0), series
        return alone, found

    def _run(self, case: Case) -> dict[str, Any]:
        kind = self._ranks[case], case in self._fast
        cases = [list(each) for each in self._ranks if (self._ranks[each], each in self._fast) == kind]
        if self._ranks[case] == 1:
            return self._train(str(self.folder), cases)
        found: dict[str, Any] = self._torchrun(self._train, self._ranks[case], folder=str(self.folder), cases=cases)[0]
        return found
