"""Keeps all records of the compiler while a rung runs. They are global to the process: one recording at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from service.compilation.evidence import CompilerEvidence, GraphBreak, Reason, Recompile
from service.compilation.instruments.cudagraphs import Captures, watched_captures
from service.compilation.instruments.text import FRAME, first_line
from service.compilation.rungs import Rung
from service.torch_internals.table import internal

_RECORDS_KEPT = 4096
_LIMIT = "recompile limit"
_HOOKS = "torch/distributed/fsdp/"
_INLINE = "torch._dynamo.symbolic_convert.InliningInstructionTranslator.inline_call"


@contextmanager
def recorder(rung: Rung, device: torch.device) -> Iterator[Recorder]:
    """Record from an empty state; enter it after a reset of earlier compilations."""
    utils = _utils()
    utils.counters.clear()
    utils.graph_break_reasons.clear()
    utils.set_compilation_metrics_limit(_RECORDS_KEPT)  # the default is 64
    utils.clear_compilation_metrics()
    with watched_captures() if rung.cuda_graphs else nullcontext() as captures, _traced_hooks() as hooks:
        yield Recorder(device, captures, hooks)


@dataclass
class Recorder:
    """Reads the records, iteration by iteration, since it began, without the excused ones."""

    device: torch.device
    captures: Captures | None
    """The CUDA graphs of a rung that makes them."""
    hooks: list[str]
    """The hooks of FSDP that Dynamo has traced."""
    marks: list[int] = field(default_factory=list)
    """How many records there were at the end of each iteration."""
    excused: list[Any] = field(default_factory=list)
    """Records that do not count."""

    def end_iteration(self) -> bool:
        """Close an iteration; true if anything was compiled, or a CUDA graph recorded, in it."""
        before = self.marks[-1] if self.marks else 0
        self.marks.append(len(self._records()))
        recorded = self.captures is not None and self.captures.end_iteration()
        return recorded or self.marks[-1] > before

    def excuse(self) -> None:
        """Excuse compilations and recordings since the last iteration was closed."""
        self.excused += self._records()[self.marks[-1] :]
        if self.captures is not None:
            self.captures.recorded[-1] = 0

    def _records(self) -> list[Any]:
        return [record for record in _records() if not any(record is each for each in self.excused)]

    def evidence(self, warm_up: int, steady: int, switches: Iterable[str] = ()) -> CompilerEvidence:
        """Return all records: from iteration ``warm_up`` on nothing should be compiled, from ``steady`` on no
        CUDA graph recorded.
        """
        records, utils = self._records(), _utils()
        forward = [record for record in records if record.is_forward is not False]
        failed = [record for record in forward if record.fail_type]
        return CompilerEvidence(
            graphs=int(utils.counters["stats"]["unique_graphs"]),
            backward_graphs=sum(record.is_forward is False for record in records),
            operations=int(utils.counters["stats"]["calls_captured"]),
            graph_breaks=(*_graph_breaks(), *_declined(failed)),
            recompiles=tuple(self._recompiles(forward)),
            late=tuple(index for index in range(warm_up, len(self.marks)) if self.marks[index] > self.marks[index - 1]),
            limit_hits=tuple(_limit_hit(record) for record in failed if _is_limit(record)),
            failures=tuple(_failure(record) for record in failed if _is_silent_failure(record)),
            switches=tuple(switches),
            autograd_captures=int(utils.counters["compiled_autograd"]["captures"]),
            hooks=tuple(Reason(name, count) for name, count in Counter(self.hooks).items()),
            cuda_graphs=self.captures.evidence(self.device, steady) if self.captures else None,
        )

    def _recompiles(self, forward: list[Any]) -> Iterable[Recompile]:
        positions = {id(record): index for index, record in enumerate(self._records())}
        for record in forward:
            if record.recompile_reason:
                place = positions[id(record)]
                yield _recompile(record, sum(mark <= place for mark in self.marks))


def _utils() -> Any:
    return internal("torch._dynamo.utils")


def _records() -> list[Any]:
    """Return the records of compilations, without those of run time."""
    return [record for record in _utils().get_compilation_metrics() if not getattr(record, "is_runtime", False)]


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
    return _LIMIT in str(record.fail_reason)


def _is_declined(record: Any) -> bool:
    """Return whether Dynamo declined the whole function, such as for a break in a loop; it counts no break for that."""
    return not _is_limit(record) and record.fail_type in {"Unsupported", "SkipFrame"}


def _declined(failed: Iterable[Any]) -> Iterator[GraphBreak]:
    for place, count in Counter(map(_locate_failure, filter(_is_declined, failed))).items():
        yield GraphBreak(*place, count=count)


def _locate_failure(record: Any) -> tuple[str, str, int, str]:
    place = record.fail_user_frame_filename or "", record.fail_user_frame_lineno or 0, record.co_name or ""
    return (first_line(str(record.fail_reason)), *place)


def _is_silent_failure(record: Any) -> bool:
    return not (_is_limit(record) or _is_declined(record))


def _limit_hit(record: Any) -> str:
    recompile = _recompile(record, 0)
    return f"{recompile.function} ({recompile.file}:{recompile.line}): {recompile.guard}"


def _failure(record: Any) -> str:
    return f"{record.fail_type} in {record.co_name}: {first_line(str(record.fail_reason))}"


def _graph_breaks() -> tuple[GraphBreak, ...]:
    """Return the breaks with their user frame, and those that only the counters know, without one."""
    utils = _utils()
    placed = Counter(_locate_break(reason) for reason in utils.graph_break_reasons)
    breaks = [GraphBreak(*place, count=count) for place, count in placed.items()]
    known = {found.reason for found in breaks}
    for text, count in utils.counters["graph_break"].items():
        if first_line(text) not in known:
            breaks.append(GraphBreak(first_line(text), count=int(count)))
    return tuple(breaks)


def _locate_break(reason: Any) -> tuple[str, str, int, str]:
    frame = reason.user_stack[-1] if reason.user_stack else None
    text = _readable(first_line(str(reason.reason)))
    return (text, frame.filename, int(frame.lineno or 0), frame.name) if frame else (text, "", 0, "")


def _readable(reason: str) -> str:
    """Return a readable reason: Dynamo's own name for a jump on a tensor says little to a user."""
    return f"data-dependent branch ({reason})" if reason.startswith("generic_jump") else reason


@contextmanager
def _traced_hooks() -> Iterator[list[str]]:
    """Yield a list that gets FSDP's hooks that Dynamo inlines into a graph within: they gather and reshard parameters,
    and must stay outside of graphs.
    """
    found: list[str] = []
    inline = internal(_INLINE).__func__

    def watched(cls: Any, parent: Any, function: Any, *arguments: Any, **keywords: Any) -> Any:
        code = getattr(function, "get_code", lambda: None)()
        if code is not None and _HOOKS in code.co_filename.replace("\\", "/"):
            found.append(f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})")
        return inline(cls, parent, function, *arguments, **keywords)

    with patch(_INLINE, classmethod(watched)):
        yield found
