"""Reports input shapes that are new to the end: with CUDA graphs each is one more recording, without a limit."""

from __future__ import annotations

from collections.abc import Iterator

from service.compilation.run.observation import Observation
from service.compilation.verdicts import Finding
from service.parallel.boundary import Shapes

_AT_LEAST = 3
"""Steps at the end of which each must have brought a new shape."""


def detect(observation: Observation) -> Iterator[Finding]:
    if not observation.case.rung.overwrites:
        return
    for module, shapes in observation.usage.shapes.items():
        distinct = frozenset[Shapes]().union(*shapes)
        if _never_settles(shapes):
            examples = ", ".join(" ".join(str(list(each)) for each in shape) for shape in sorted(distinct)[:_AT_LEAST])
            yield Finding(
                "unstable",
                f"{module} is called with new shapes in every step, {len(distinct)} in {len(shapes)} steps "
                f"({examples}, …): a CUDA graph is recorded for each; pad to a few sizes",
            )


def _never_settles(shapes: tuple[frozenset[Shapes], ...]) -> bool:
    if len(shapes) <= _AT_LEAST:
        return False
    seen: set[Shapes] = set()
    news = []
    for each in shapes:
        news.append(bool(each - seen))
        seen |= each
    return all(news[-max(_AT_LEAST, len(shapes) // 2) :])
