"""Runs a kind of job without a service, for a test or a measurement: records its reports, has its uploads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from service.jobs.events import BoundsRow
from service.jobs.files import DataLayout
from service.jobs.runtime import NullReporter


class RecordingReporter(NullReporter):
    """Keeps metrics, bounds, searches, trees and artifacts in memory."""

    def __init__(self) -> None:
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.bounds: list[dict[str, Any]] = []
        self.searches: list[dict[str, Any]] = []
        self.trees: list[dict[str, Any]] = []
        self.artifacts: list[Path] = []

    def metric(self, step: int, values: Mapping[str, float]) -> None:
        self.metrics.append((step, dict(values)))

    def bound(self, row: BoundsRow) -> None:
        self.bounds.append(row.as_dict())

    def search(self, moment: Mapping[str, Any]) -> None:
        self.searches.append(dict(moment))

    def tree(self, found: Mapping[str, Any]) -> None:
        self.trees.append(dict(found))

    def artifact(self, path: Path, media_type: str = "application/octet-stream") -> None:
        self.artifacts.append(path)

    def series(self, name: str) -> Sequence[float]:
        return [values[name] for _, values in self.metrics if name in values]


def upload(data: DataLayout, content: bytes) -> str:
    """Put a file where uploads lie; return its id."""
    name = f"file_{hashlib.sha256(content).hexdigest()}"
    if not data.file(name).exists():  # as when another rank, which may be reading it, has uploaded it
        data.file(name).parent.mkdir(parents=True, exist_ok=True)
        data.file(name).write_bytes(content)
    return name
