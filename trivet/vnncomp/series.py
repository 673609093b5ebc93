"""Runs a folder of benchmarks, and goes on where a killed run stopped: ``results.csv`` is only appended to.

A row is the competition's, ``category,onnx,vnnlib,prepare seconds,verdict,run seconds``, and why there is no verdict.
Beside it, in a folder for each category, lie the witnesses, compressed by gzip.
"""

from __future__ import annotations

import csv
import gzip
import io
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path

from service.jobs.files import atomic_write
from service.jobs.text import visible
from trivet.errors import TrivetError
from trivet.vnncomp.answers import Decided, WitnessFormatError, verdict_of
from trivet.vnncomp.instances import BenchmarkInstance, content, key_of, unpacked
from trivet.vnncomp.questions import Question
from trivet.vnncomp.scoring import Key, ToolResult, WitnessEvidence
from trivet.vnncomp.witness import RefutedError, ReplayedNetwork, replayed

RESULTS = "results.csv"
Deciding = Callable[[BenchmarkInstance], Decided]


class ResultsError(TrivetError):
    """A file of results cannot be read; the message names the file and the line."""


@dataclass(frozen=True)
class ResultsFolder:
    """Results of one tool: ``results.csv``, and the files of its witnesses."""

    root: Path
    lock: threading.Lock = field(default_factory=threading.Lock)

    def rows(self) -> Iterator[tuple[Key, list[str]]]:
        """Yield the rows that are complete; a last one that a kill cut off is not. Raises :class:`ResultsError`."""
        path = self.root / RESULTS
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        for line, row in enumerate(csv.reader(io.StringIO(text[: text.rfind("\n") + 1])), 1):
            if len(row) < 6:
                raise ResultsError(f"{path} line {line}: got {row!r}, expected {', '.join(_COLUMNS)}")
            yield key_of(*row[:3]), row

    def recorded(self, every: Sequence[BenchmarkInstance]) -> dict[Key, ToolResult]:
        """Return the results for these instances; the witness of each ``sat`` is replayed, if it is there. Where
        several instances have one name for it, one that does not hold may be another's.
        """
        known, found = {each.key: each for each in every}, {}
        named = Counter((each.category, each.witness_name) for each in known.values())
        for key, row in self.rows():
            if key in known:
                verdict = verdict_of(row[4])
                evidence = self._evidence(row[0], known[key]) if verdict == "sat" else WitnessEvidence.NONE
                is_shared = named[known[key].category, known[key].witness_name] > 1
                if evidence is WitnessEvidence.REFUTED and is_shared:
                    evidence = WitnessEvidence.NONE
                found[key] = ToolResult(verdict, _number(row[5]), evidence, row[6] if len(row) > 6 else "")
        return found

    def _evidence(self, category: str, instance: BenchmarkInstance) -> WitnessEvidence:
        """Return what is known of a witness; the competition's own folders are named by the year, too."""
        inner = escape(f"{category}/{instance.witness_name}")
        named = [*self.root.glob(inner), *self.root.glob(f"20[0-9][0-9]_{inner}")]
        if not named:
            return WitnessEvidence.NONE
        try:
            question = Question.read(category, instance.networks, instance.folder / instance.vnnlib)
            witness = question.parse_witness(unpacked(named[0]).decode())
            found = replayed(ReplayedNetwork(content(question.onnx)), question.query, witness.inputs)
        except (RefutedError, WitnessFormatError):
            return WitnessEvidence.REFUTED
        except (TrivetError, OSError, UnicodeDecodeError):
            return WitnessEvidence.NONE
        return WitnessEvidence.STRICT if found.is_strict else WitnessEvidence.NEARBY

    def run(
        self, every: Sequence[BenchmarkInstance], decide: Deciding, at_once: int, tell: Callable[[str], None]
    ) -> None:
        """Decide the instances that have no row yet, so many at a time, and append a row for each.

        An error that :meth:`decide` does not expect leaves its instance without a row, and is raised at the end.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self._end_last_line()
        done = {key for key, _ in self.rows()}
        open_ = {each.key: each for each in every if each.key not in done}.values()
        pool = ThreadPoolExecutor(at_once)
        try:
            unexpected = list[Exception]()
            for future in [pool.submit(self._run, each, decide) for each in open_]:
                try:
                    tell(future.result())
                except Exception as error:  # a defect, which must not keep the other instances from being run
                    unexpected.append(error)
            if unexpected:
                raise unexpected[0]
        finally:
            pool.shutdown(cancel_futures=True)

    def _end_last_line(self) -> None:
        path = self.root / RESULTS
        if path.is_file() and not (text := path.read_bytes()).endswith(b"\n"):
            atomic_write(path, text[: text.rfind(b"\n") + 1])

    def _run(self, instance: BenchmarkInstance, decide: Deciding) -> str:
        started = time.monotonic()
        decided = decide(instance)
        seconds = time.monotonic() - started
        if decided.witness is not None:
            home = self.root / instance.category
            home.mkdir(parents=True, exist_ok=True)
            atomic_write(home / instance.witness_name, gzip.compress(decided.witness.text().encode()))
        named, reason = (instance.category, instance.onnx, instance.vnnlib), visible(decided.reason)
        row = io.StringIO()
        csv.writer(row, lineterminator="\n").writerow([*named, 0.0, decided.verdict, f"{seconds:.3f}", reason])
        with self.lock, (self.root / RESULTS).open("a", encoding="utf-8") as file:
            file.write(row.getvalue())
        why = f": {reason}" if reason else ""
        return f"{' '.join(instance.key)}: {decided.verdict} after {seconds:.2f} s{why}"


_COLUMNS = "category", "onnx", "vnnlib", "prepare seconds", "verdict", "run seconds"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ResultsError(f"got {text!r} in {RESULTS}, expected seconds") from None
