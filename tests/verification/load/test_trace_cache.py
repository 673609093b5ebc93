"""A network is traced by the first job that asks about it, and read by the next ones of the same owner."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from onnx_jobs import BOX, DECLARED, specification
from verify_jobs import context

from service.bounds.capture import capture
from service.bounds.graph import Graph, Node
from service.jobs.files import DataLayout
from service.verification import job
from service.verification.load import task_loader, trace_cache
from service.verification.load.trace_cache import FOLDER, TraceCache

CPU = torch.device("cpu")
ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
QUERY = f"{DECLARED}{BOX}(assert (>= Y_0 1000))"
"""What bounds alone decide."""


class Traces:
    """Counts how often a model is traced that a cache is asked for."""

    def __init__(self, folder: Path) -> None:
        self.count, self.folder = 0, folder
        self.cache = TraceCache(folder)

    def asked(self, model: str = "model", dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The constant of a graph that the cache returns for these."""
        return self.cache.graph(model, dtype, CPU, self._trace).input.constant("weight")

    def _trace(self) -> Graph:
        self.count += 1
        return Graph((Node("x", "input", {"weight": torch.tensor([1.0, 2.0])}, (2,)),))

    @property
    def kept(self) -> list[Path]:
        return sorted((self.folder / FOLDER).iterdir())


@pytest.fixture
def traces(tmp_path: Path) -> Traces:
    return Traces(tmp_path)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def test_the_next_job_reads_it_and_finds_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Literal["cpu", "cuda"]
) -> None:
    traced: list[Graph] = []
    data = DataLayout(tmp_path / "data")

    def noted(module: torch.nn.Module, shape: Any) -> Graph:
        traced.append(capture(module, shape))
        return traced[-1]

    def rows() -> list[dict[str, Any]]:
        ranked, report = context(data)
        ranked = replace(ranked, host_cache=tmp_path, device_type=device)
        job.run(specification(data, QUERY, method="crown"), ranked)
        return [row | {"seconds": 0.0} for row in report.bounds]

    monkeypatch.setattr(task_loader, "capture", noted)
    assert rows() == rows()
    assert len(traced) == len(Traces(tmp_path).kept) == 1


def test_another_model_type_or_code_is_traced_by_itself(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    for change in (
        lambda: None,
        lambda: traces.asked("another"),
        lambda: traces.asked(dtype=torch.float64),
        lambda: monkeypatch.setattr(trace_cache, "CODE", "of another version"),
    ):
        change()
        traces.asked()
        traces.asked()
    assert traces.count == len(traces.kept) == 4


@pytest.mark.parametrize("left", [b"", b"no graph" * 9, None], ids=["empty", "other bytes", "a folder"])
def test_what_cannot_be_read_is_made_anew(traces: Traces, left: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever another job left there."""
    traces.asked()
    (kept,) = traces.kept
    if left is None:
        kept.unlink()
        kept.mkdir()
    else:
        kept.write_bytes(left)
    assert traces.asked().tolist() == [1.0, 2.0]
    assert traces.count == 2
    assert "a kept trace cannot be read" in caplog.text
    assert [each for each in traces.kept if each.name.startswith(".")] == []


def test_a_disk_that_takes_nothing_is_no_reason_to_fail(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace_cache, "atomic_write", full)
    assert traces.asked().tolist() == traces.asked().tolist() == [1.0, 2.0]
    assert traces.count == 2


def test_without_a_folder_and_of_large_networks_none_is_kept(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph(())
    made: Callable[[], Graph] = lambda: graph  # noqa: E731
    assert TraceCache().graph("name", torch.float32, CPU, made) is graph
    monkeypatch.setattr(trace_cache, "LARGEST", 7)
    traces.asked()
    traces.asked()
    assert traces.count == 2
    assert not (traces.folder / FOLDER).exists()


def test_the_folder_is_its_owners_alone_and_reading_keeps_it_young(traces: Traces) -> None:
    traces.asked()
    (kept,) = traces.kept
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    os.utime(kept, (0, 0))
    traces.asked()
    assert traces.count == 1
    assert kept.stat().st_mtime > 0
