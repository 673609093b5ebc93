"""Folders of benchmarks: their lists, runs that go on after a kill, and answers to what goes wrong."""

from __future__ import annotations

import gzip
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from competition_instances import NEVER, SATISFIED, VERSION_2, benchmark

from service.jobs.records import JobError
from service.jobs.spec.verify import VerifyBudget
from trivet.client import Client
from trivet.errors import Refused
from trivet.vnncomp.answers import Decided, Witness
from trivet.vnncomp.deciding import asking, decide
from trivet.vnncomp.instances import BenchmarkError, BenchmarkInstance, instances, key_of, labels
from trivet.vnncomp.questions import Question
from trivet.vnncomp.scoring import WitnessEvidence
from trivet.vnncomp.series import ResultsError, ResultsFolder

ROWS = {"never": (NEVER, 60.0), "met": (SATISFIED, 30.0), "new": (VERSION_2, 10.0)}
DAMAGED = gzip.compress(b"")[:10] + b"\xff" * 9
"""No deflated data behind gzip's header."""


def silent(_: str) -> None:
    pass


def test_a_folder_of_benchmarks_is_read_with_its_labels(tmp_path: Path) -> None:
    one = benchmark(tmp_path / "tiny_2024", ROWS)
    (one / "labels.csv").write_text("vnnlib,onnx,label\nvnnlib/met.vnnlib,onnx/net.onnx,sat\nvnnlib/new.vnnlib,o,?\n")
    found = instances(tmp_path)
    assert [(each.category, each.vnnlib, each.limit_s) for each in found] == [
        ("tiny_2024", f"vnnlib/{name}.vnnlib", seconds) for name, (_, seconds) in ROWS.items()
    ]
    assert instances(one)[0].category == "tiny_2024"
    assert labels(found) == {found[1].key: "sat"}


def test_of_a_benchmark_in_two_versions_of_vnnlib_the_first_counts(tmp_path: Path) -> None:
    for version, name in (("1.0", "met"), ("2.0", "new")):
        benchmark(tmp_path / "tiny" / version, {name: ROWS[name]})
    found = [("tiny", "vnnlib/met.vnnlib")]
    assert [(each.category, each.vnnlib) for each in instances(tmp_path)] == found
    assert [(each.category, each.vnnlib) for each in instances(tmp_path / "tiny" / "1.0")] == found


@pytest.mark.parametrize(
    "row", ["net.onnx,p.vnnlib", "net.onnx,p.vnnlib,0", "net.onnx,p.vnnlib,long", "net.onnx,,1", "[('f',p.vnnlib,1"]
)
def test_a_row_that_is_no_instance_is_named(tmp_path: Path, row: str) -> None:
    (tmp_path / "instances.csv").write_text(f"a.onnx,a.vnnlib,1\n{row}\n")
    with pytest.raises(BenchmarkError, match=r"instances\.csv line 2: got .* expected (ONNX,VNNLIB,SECONDS|a network)"):
        instances(tmp_path)


def test_a_folder_without_benchmarks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"has no instances\.csv"):
        instances(tmp_path)


def test_an_instance_has_one_key_in_the_results_of_all_tools() -> None:
    assert key_of("2025_tiny", "/home/x/benchmarks/tiny/onnx/m/n.onnx", "./vnnlib/m/p.vnnlib.gz") == key_of(
        "tiny", "onnx/m/n.onnx", "vnnlib/m/p.vnnlib"
    )
    nested = BenchmarkInstance("safenlp", Path(), "onnx/medical/n.onnx", "vnnlib/medical/p.vnnlib", 1.0)
    assert nested.witness_name == "medical_n_p.counterexample.gz"
    first, other = ("[('f', 'onnx/a.onnx'), ('g', 'onnx/c.onnx')]", "[('f', './onnx/b.onnx'), ('g', './onnx/c.onnx')]")
    assert key_of("tiny", first, "p") == ("tiny", "f=onnx/a.onnx,g=onnx/c.onnx", "p") != key_of("tiny", other, "p")


def test_instances_that_results_could_not_tell_apart_are_refused(tmp_path: Path) -> None:
    (tmp_path / "instances.csv").write_text("a/n.onnx,p.vnnlib,1\n./a/n.onnx,p.vnnlib,2\n")
    assert len(instances(tmp_path)) == 2
    (tmp_path / "instances.csv").write_text("a/n.onnx,p.vnnlib,1\nb/n.onnx,p.vnnlib,1\n")
    with pytest.raises(BenchmarkError, match=r"as they name a/n\.onnx,p\.vnnlib of .*,n\.onnx,p\.vnnlib;"):
        instances(tmp_path)


def test_a_killed_run_goes_on_with_what_has_no_complete_row(tmp_path: Path) -> None:
    every = instances(benchmark(tmp_path / "tiny", ROWS))
    folder, asked = ResultsFolder(tmp_path / "results"), list[str]()

    def answer(instance: BenchmarkInstance) -> Decided:
        asked.append(instance.vnnlib)
        return Decided("timeout", reason="its time, and\nmore")

    folder.run(every[:2], answer, 1, silent)
    path = folder.root / "results.csv"
    kept = path.read_text()
    path.write_text(kept[:-9])  # the kill came in the middle of the second row
    folder.run(every, answer, 2, silent)
    assert asked[2:] == [each.vnnlib for each in every[1:]]
    assert path.read_text().startswith(kept.splitlines(keepends=True)[0])
    found = folder.recorded(every)
    assert [found[each.key].verdict for each in every] == ["timeout"] * 3
    assert found[every[0].key].reason == "its time, and\\nmore"
    folder.run(every, answer, 1, silent)
    assert len(asked) == 4


def test_a_defect_at_one_instance_keeps_no_other_from_being_run(tmp_path: Path) -> None:
    every, folder = instances(benchmark(tmp_path / "tiny", ROWS)), ResultsFolder(tmp_path / "results")

    def answer(instance: BenchmarkInstance) -> Decided:
        if instance is every[0]:
            raise TypeError("a defect")
        return Decided("unsat")

    with pytest.raises(TypeError, match="a defect"):
        folder.run(every, answer, 1, silent)
    assert [each.key in folder.recorded(every) for each in every] == [False, True, True]


def test_a_recorded_witness_counts_as_far_as_it_holds(tmp_path: Path) -> None:
    every = instances(benchmark(tmp_path / "tiny", {"never[1]": ROWS["never"], "met": ROWS["met"]}))
    witnesses = {every[0].key: Witness((0.0,) * 5, (200.0,) * 3), every[1].key: Witness((0.0,) * 5, (0.0,) * 3)}
    folder = ResultsFolder(tmp_path / "results")
    folder.run(every, lambda each: Decided("sat", witnesses[each.key]), 1, silent)
    found = folder.recorded(every)
    assert [found[each.key].evidence for each in every] == [WitnessEvidence.REFUTED, WitnessEvidence.STRICT]
    (folder.root / "tiny").rename(folder.root / "2025_tiny")  # as the competition publishes them
    assert folder.recorded(every)[every[1].key].evidence is WitnessEvidence.STRICT
    (folder.root / "2025_tiny" / every[1].witness_name).write_bytes(DAMAGED)
    assert folder.recorded(every)[every[1].key].evidence is WitnessEvidence.NONE


def test_a_witness_of_a_name_that_two_instances_have_may_be_the_others(tmp_path: Path) -> None:
    one, folder = benchmark(tmp_path / "tiny", {"met": (NEVER, 30.0)}), ResultsFolder(tmp_path / "results")
    (one / "onnx" / "m").mkdir()
    (one / "onnx" / "m" / "net.onnx.gz").write_bytes((one / "onnx" / "net.onnx.gz").read_bytes())
    (one / "instances.csv").write_text("onnx/net.onnx,vnnlib/met.vnnlib,1\nonnx/m/net.onnx,vnnlib/met.vnnlib,1\n")
    every = instances(one)
    folder.run(every, lambda _: Decided("sat", Witness((0.0,) * 5, (200.0,) * 3)), 1, silent)
    refuted = [folder.recorded(some)[every[0].key].evidence for some in (every[:1], every)]
    assert refuted == [WitnessEvidence.REFUTED, WitnessEvidence.NONE]


def test_results_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("tiny,net.onnx\n")
    with pytest.raises(ResultsError, match=r"results\.csv line 1: got .* expected category, onnx"):
        list(ResultsFolder(tmp_path).rows())


FALSIFIED = {"verdict": "falsified", "counterexample": [0.0] * 5}


@pytest.mark.parametrize(
    ("name", "row", "verdict", "reason"),
    [
        ("met", FALSIFIED, "sat", ""),
        ("never", FALSIFIED, "unknown", "the counterexample does not hold in onnxruntime"),
        ("never", {"verdict": "verified"}, "unsat", ""),
        ("never", {"verdict": "unknown", "reason": "why"}, "unknown", "why"),
        ("never", None, "timeout", "5 seconds were spent"),
        ("new", FALSIFIED, "sat", ""),
        ("absent", FALSIFIED, "unknown", "there is no file"),
    ],
)
def test_a_row_becomes_an_answer(
    tmp_path: Path, name: str, row: Mapping[str, Any] | None, verdict: str, reason: str
) -> None:
    home = benchmark(tmp_path / "tiny", ROWS)
    found = decide(question(home, name), lambda *_: row, 5.0)
    assert found.verdict == verdict
    assert reason in found.reason
    assert (found.witness is not None) == (verdict == "sat")


def question(home: Path, name: str) -> Any:
    return lambda: Question.read("tiny", {None: home / "onnx" / "net.onnx"}, home / "vnnlib" / f"{name}.vnnlib")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    home = benchmark(tmp_path / "tiny", ROWS)
    path = home / "vnnlib" / "met.vnnlib.gz"
    for damaged in (gzip.compress(SATISFIED.encode())[:-9], DAMAGED):
        path.write_bytes(damaged)
        with pytest.raises(BenchmarkError, match=r"cannot read .*met\.vnnlib\.gz"):
            question(home, "met")()
    path.write_bytes(gzip.compress(b"(assert (<= Z 0))"))
    with pytest.raises(BenchmarkError, match=r"met\.vnnlib: line 1: got 'Z'"):
        question(home, "met")()


class FakeService:
    """A service whose jobs are what a test says."""

    def __init__(self, rows: list[dict[str, Any]], state: str = "running", error: JobError | None = None) -> None:
        self.rows, self.seen, self.cancelled = rows, SimpleNamespace(state=state, error=error), list[str]()

    def upload(self, path: Path) -> SimpleNamespace:
        return SimpleNamespace(id=path.name)

    def submit(self, spec: dict[str, Any]) -> SimpleNamespace:
        # A search on a GPU bounds the usual million within seconds.
        assert VerifyBudget.model_validate(spec["budget"]).domains == 10**9
        if not math.isfinite(spec["budget"]["seconds"]) or spec["property"]["vnnlib"] != "met.vnnlib.gz":
            raise Refused(422, "Invalid spec", "refused", [{"path": "property.vnnlib", "message": "not this one"}])
        return SimpleNamespace(id="job_1")

    def job(self, job_id: str, *, wait_s: float) -> SimpleNamespace:
        time.sleep(min(wait_s, 0.01))
        return self.seen

    def bounds(self, job_id: str) -> Iterator[dict[str, Any]]:
        yield from self.rows

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)


def asked(service: FakeService, home: Path, name: str = "met", limit_s: float = 30.0) -> Decided:
    return decide(question(home, name), asking(cast(Client, service), "cpu"), limit_s)


def test_a_job_of_the_service_is_answered_by_its_first_row(tmp_path: Path) -> None:
    home = benchmark(tmp_path / "tiny", ROWS)
    assert asked(FakeService([FALSIFIED]), home).verdict == "sat"
    assert "property.vnnlib: not this one" in asked(FakeService([]), home, "never").reason


def test_a_failed_job_is_an_error(tmp_path: Path) -> None:
    failed = FakeService([], "failed", JobError(type="WrongBoundsError", message="instance 0"))
    found = asked(failed, benchmark(tmp_path / "tiny", ROWS))
    assert (found.verdict, found.reason) == ("error", "job_1 failed: WrongBoundsError: instance 0")


FAILS = """#!/bin/sh
exec {python} -c '
import os, socket
with socket.socket(socket.AF_UNIX) as control:
    control.connect(os.environ["TRIVET_EVENTS"])
    control.sendall({word!r}.encode())
os._exit(3)'
"""


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ('{"rank": 0}\n{"type": "error", "error": "MemoryError", "message": "none left"}\n', "MemoryError: none left"),
        ("killed", "the rank ended with exit code 3: killed"),
    ],
)
def test_a_rank_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, told: str) -> None:
    program = tmp_path / "python"
    program.write_text(FAILS.replace("{python}", sys.executable).replace("{word!r}", json.dumps(word)))
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = decide(question(benchmark(tmp_path / "tiny", ROWS), "met"), asking(None, "cpu"), 60.0)
    assert (found.verdict, found.reason) == ("error", told)


def test_a_rank_without_a_row_in_time_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho $$ > "{tmp_path}/pid"\nexec sleep 600\n')
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = decide(question(benchmark(tmp_path / "tiny", ROWS), "met"), asking(None, "cpu"), 0.8)
    assert found.verdict == "timeout"
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_a_job_without_a_row_in_time_is_cancelled(tmp_path: Path) -> None:
    late = FakeService([])
    began = time.monotonic()
    assert asked(late, benchmark(tmp_path / "tiny", ROWS), limit_s=0.5).verdict == "timeout"
    assert time.monotonic() - began >= 0.25
    assert late.cancelled == ["job_1"]
