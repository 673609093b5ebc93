"""Keep decided instances on disk: a requeued job goes on where the attempt before was lost.

Each rank that leads an instance group appends a line for every instance to a file of its own, before it is reported.
A later attempt takes what all files of earlier ones hold; the last line of one may be torn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from service.jobs.bounds_row import BoundsRow


@dataclass(frozen=True)
class DecidedRow:
    """A row, and for each non-linear node the sums that :func:`~service.verification.results.layer_means` adds up."""

    row: BoundsRow
    layers: list[list[float]]

    @property
    def instance(self) -> int:
        return self.row.instance


class ResumeLog:
    """The rows of a job in ``folder``, written by attempt ``attempt`` for one data-parallel rank."""

    def __init__(self, folder: Path, attempt: int, rank: int) -> None:
        self._folder, self._attempt = folder, attempt
        self._own = folder / _name(attempt, rank)

    def earlier(self) -> dict[int, DecidedRow]:
        """Return what earlier attempts decided on all ranks, by instance."""
        return self._read(range(self._attempt))

    def everything(self) -> dict[int, DecidedRow]:
        """Return what all attempts up to this one decided, by instance; other ranks must have written theirs."""
        return self._read(range(self._attempt + 1))

    def add(self, entries: list[DecidedRow]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"row": entry.row.as_dict(), "layers": entry.layers}) + "\n" for entry in entries]
        with self._own.open("a", encoding="utf-8") as file:
            file.write("".join(lines))

    def _read(self, attempts: range) -> dict[int, DecidedRow]:
        files = (path for attempt in attempts for path in sorted(self._folder.glob(_name(attempt, "*"))))
        found = (entry for path in files for entry in _entries(path))
        return {entry.instance: entry for entry in found}


def _name(attempt: int, rank: int | str) -> str:
    return f"rows-{attempt}-{rank}.jsonl"


def _entries(path: Path) -> Iterator[DecidedRow]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.endswith("\n"):
                return  # the attempt died while it wrote
            try:
                held = json.loads(line)
                entry = DecidedRow(BoundsRow(**held["row"]), held["layers"])
            except (ValueError, KeyError, TypeError):
                return  # what a loss of power left; its instances are decided again
            yield entry
