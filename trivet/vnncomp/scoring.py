"""Counts points by the rules of 2026, for several tools beside each other.

A right verdict gives 10 points, a wrong one −150, any other answer none. There is no bonus for speed: the scoring of
2026 has that of earlier years switched off (``get_score`` and ``PENALTY_INCORRECT`` in the source that
:mod:`trivet.vnncomp` names). ``sat`` is right with a witness of its own that holds, if only within the tolerance.
``unsat`` is wrong if a witness of any tool holds within the box itself. A score is the points in per cent of the best
tool's points in the category, or none below zero, and a tool's score is the sum over categories (``compare_results`` in
``process_results.py`` there, as of commit 40ababf).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from trivet.vnncomp.answers import CompetitionVerdict

RIGHT, WRONG = 10, -150
Key = tuple[str, str, str]


class WitnessEvidence(Enum):
    """What is known of a witness; with ``NONE``, as without a file of it, only a label can tell."""

    STRICT = "holds in the box"
    NEARBY = "holds within the tolerance"
    REFUTED = "does not hold"
    NONE = "not known"


@dataclass(frozen=True)
class ToolResult:
    """A tool's result for an instance."""

    verdict: CompetitionVerdict
    seconds: float
    evidence: WitnessEvidence = WitnessEvidence.NONE
    reason: str = ""

    @property
    def is_decided(self) -> bool:
        return self.verdict in ("sat", "unsat")


Results = Mapping[Key, ToolResult]


@dataclass
class CategoryScore:
    """A tool's results in a category; ``seconds`` are those of right verdicts, ``percent`` the score."""

    tool: str
    category: str
    instances: int = 0
    sat: int = 0
    unsat: int = 0
    wrong: list[Key] = field(default_factory=list)
    points: int = 0
    seconds: float = 0.0
    percent: float = 0.0

    def add(self, key: Key, recorded: ToolResult, truth: str | None) -> None:
        self.instances += 1
        points = points_of(recorded, truth)
        self.points += points
        if points < 0:
            self.wrong.append(key)
        elif points > 0:
            self.seconds += recorded.seconds
            self.sat += recorded.verdict == "sat"
            self.unsat += recorded.verdict == "unsat"


def truth_of(every: Iterable[ToolResult], label: str | None) -> str | None:
    """Return the answer to an instance: a witness within the box proves ``sat``, else it is the label's, if any."""
    return "sat" if any(each.verdict == "sat" and each.evidence is WitnessEvidence.STRICT for each in every) else label


def points_of(recorded: ToolResult, truth: str | None) -> int:
    """Return the points of a result. A ``sat`` whose witness is not there is judged by the truth alone, as if its
    witness held where none is known.
    """
    if not recorded.is_decided:
        return 0
    if recorded.verdict == "unsat":
        return WRONG if truth == "sat" else RIGHT
    if recorded.evidence is WitnessEvidence.NONE:
        return WRONG if truth == "unsat" else RIGHT
    return WRONG if recorded.evidence is WitnessEvidence.REFUTED else RIGHT


def scores(keys: Sequence[Key], tools: Mapping[str, Results], labels: Mapping[Key, str]) -> list[CategoryScore]:
    """Return a score for each category and tool, in their order; an instance without a result gives no points."""
    found: dict[tuple[str, str], CategoryScore] = {}
    nothing = ToolResult("unknown", 0.0)
    for key in keys:
        recorded = {tool: results.get(key, nothing) for tool, results in tools.items()}
        truth = truth_of(recorded.values(), labels.get(key))
        for tool, each in recorded.items():
            place = (key[0], tool)
            found.setdefault(place, CategoryScore(tool, key[0])).add(key, each, truth)
    for category in {category for category, _ in found}:
        of_category = [score for score in found.values() if score.category == category]
        best = max(score.points for score in of_category)
        for score in of_category:
            score.percent = max(0.0, 100 * score.points / best) if best > 0 else 0.0
    return list(found.values())


def missed(
    keys: Sequence[Key], own: Results, peers: Mapping[str, Results], labels: Mapping[Key, str]
) -> list[tuple[Key, list[str]]]:
    """Return the instances that tools or labels decide and this one did not, with who decides them."""
    nothing, found = ToolResult("unknown", 0.0), list[tuple[Key, list[str]]]()
    for key in keys:
        names = [name for name, results in peers.items() if results.get(key, nothing).is_decided]
        if key in labels:
            names.append(f"its label ({labels[key]})")
        if names and not own.get(key, nothing).is_decided:
            found.append((key, names))
    return found
