"""Keeps what Dynamo records about its compilations.

``torch._dynamo.utils.counters``, ``get_compilation_metrics`` and ``graph_break_reasons`` exist on torch 2.11 to 2.13.
They are global to the process: one recording at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch._dynamo import utils

from service.compilation.evidence import CompilerEvidence, GraphBreak, Recompile
from service.compilation.torch_internals.text import FRAME, first_line

_RECORDS_KEPT = 4096
LIMIT = "recompile limit"


def clear_records() -> None:
    """Forget all records so far, and keep enough of the coming ones (the default is 64)."""
    utils.counters.clear()
    utils.graph_break_reasons.clear()
    utils.set_compilation_metrics_limit(_RECORDS_KEPT)
    utils.clear_compilation_metrics()


@dataclass
class CompilationRecords:
    """Reads Dynamo's records, iteration by iteration, since ``clear_records``; not those that were excused."""

    marks: list[int] = field(default_factory=list)
    excused: list[Any] = field(default_factory=list)

    def end_iteration(self) -> bool:
        """Close an iteration; true if anything was compiled in it."""
        before = self.marks[-1] if self.marks else 0
        self.marks.append(len(self._records()))
        return self.marks[-1] > before

    def excuse(self) -> None:
        """Leave out of account what was compiled since the last iteration was closed."""
        self.excused += self._records()[self.marks[-1] :]

    def _records(self) -> list[Any]:
        return [record for record in _records() if not any(record is each for each in self.excused)]

    def evidence(self, warm_up: int, switches: Iterable[str]) -> CompilerEvidence:
        """Return everything seen; iterations from ``warm_up`` on that compiled something are late."""
        records = self._records()
        forward = [record for record in records if record.is_forward is not False]
        failed = [record for record in forward if record.fail_type]
        return CompilerEvidence(
            graphs=int(utils.counters["stats"]["unique_graphs"]),
            backward_graphs=sum(record.is_forward is False for record in records),
            operations=int(utils.counters["stats"]["calls_captured"]),
            graph_breaks=_graph_breaks(),
            recompiles=tuple(self._recompiles(forward)),
            late=tuple(index for index in range(warm_up, len(self.marks)) if self.marks[index] > self.marks[index - 1]),
            limit_hits=tuple(_limit_hit(record) for record in failed if _is_limit(record)),
            failures=tuple(_failure(record) for record in failed if _is_silent_failure(record)),
            switches=tuple(switches),
            autograd_captures=int(utils.counters["compiled_autograd"]["captures"]),
        )

    def _recompiles(self, forward: list[Any]) -> Iterable[Recompile]:
        positions = {id(record): index for index, record in enumerate(self._records())}
        for record in forward:
            if record.recompile_reason:
                place = positions[id(record)]
                yield _recompile(record, sum(mark <= place for mark in self.marks))


def _records() -> list[Any]:
    """Return the records of compilations, without those of run time."""
    return [record for record in utils.get_compilation_metrics() if not getattr(record, "is_runtime", False)]


def _recompile(record: Any, iteration: int) -> Recompile:
    reason = str(record.recompile_reason)
    frame, _, guard = reason.partition(": ")
    place = FRAME.findall(reason)
    file, line, function = (
        place[-1] if place else (record.co_filename or "", record.co_firstlineno or 0, record.co_name)
    )
    return Recompile(
        str(record.compile_id or frame), _guard(guard or reason), str(function or ""), str(file), int(line), iteration
    )


def _guard(text: str) -> str:
    """Return the guard's expression, without the source comment and stack that follow it."""
    return text.splitlines()[0].split("  # ")[0].strip()


def _is_limit(record: Any) -> bool:
    return LIMIT in str(record.fail_reason)


def _is_silent_failure(record: Any) -> bool:
    """Return whether a failure is other than code that Dynamo declines (it reports that as a graph break)."""
    return not _is_limit(record) and record.fail_type not in {"Unsupported", "SkipFrame"}


def _limit_hit(record: Any) -> str:
    recompile = _recompile(record, 0)
    return f"{recompile.function} ({recompile.file}:{recompile.line}): {recompile.guard}"


def _failure(record: Any) -> str:
    return f"{record.fail_type} in {record.co_name}: {first_line(str(record.fail_reason))}"


def _graph_breaks() -> tuple[GraphBreak, ...]:
    """Return the breaks with their user frame, and those that only the counters know, without one."""
    placed = Counter(_placed(reason) for reason in utils.graph_break_reasons)
    breaks = [GraphBreak(*place, count=count) for place, count in placed.items()]
    known = {found.reason for found in breaks}
    for text, count in utils.counters["graph_break"].items():
        if first_line(text) not in known:
            breaks.append(GraphBreak(first_line(text), count=int(count)))
    return tuple(breaks)


def _placed(reason: Any) -> tuple[str, str, int, str]:
    frame = reason.user_stack[-1] if reason.user_stack else None
    text = _readable(first_line(str(reason.reason)))
    return (text, frame.filename, int(frame.lineno or 0), frame.name) if frame else (text, "", 0, "")


def _readable(reason: str) -> str:
    """Return words for a reason: Dynamo's own name for a jump on a tensor says little to a user."""
    return f"data-dependent branch ({reason})" if reason.startswith("generic_jump") else reason
