"""A verification job whose process is killed goes on where it was: what is decided is not done again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from verify_jobs import context, specification, train

from service.jobs.events import BoundsRow
from service.jobs.events.bounds_row import RowVerdict
from service.jobs.files import DataLayout
from service.verification import job
from service.verification.results import DecidedRow, ResumeLog

COUNT, DONE = 5, 2
"""Instances of the job, and those that are decided when it is killed."""
JOB = "job_" + "k" * 20


def killed_spec() -> Any:
    digits = {"data": {"source": "digits"}, "count": COUNT, "eps": 0.02}
    return specification(property={"robustness": digits}, budget={"batch": 1})


def entry(instance: int, verdict: RowVerdict = "verified") -> DecidedRow:
    row = BoundsRow(
        instance=instance, verdict=verdict, lower=[-1.0], upper=[None], margin=None, method="crown", seconds=0.5,
        domains=1, counterexample=None,
    )  # fmt: skip
    return DecidedRow(row, [[1.0, 2.0, 3.0]])


def written(data: DataLayout) -> list[dict[str, Any]]:
    path = data.job(JOB).checkpoints / "rows-1-0.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line)["row"] for line in lines]


@pytest.mark.slow
def test_a_killed_job_goes_on_where_it_was(tmp_path: Path) -> None:
    data = DataLayout(tmp_path)
    train(data)
    program = f"import test_resumed_jobs as t; t.first_attempt({str(tmp_path)!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == -signal.SIGKILL
    before = written(data)
    assert len(before) == DONE
    ranked, report = context(data, job_id=JOB, attempt=2)
    result = job.run(killed_spec(), ranked)
    assert result is not None
    assert result["instances"] == sum(result["verdicts"].values()) == COUNT
    assert report.bounds[: len(before)] == before, "told again, with the times of the first attempt"
    assert [row["instance"] for row in report.bounds] == list(range(COUNT))
    assert report.steps[0] == (len(before), COUNT, "instances")
    assert len(report.steps) == COUNT - len(before) + 1, "only the others were bounded"
    assert parquet.read_table(report.artifacts[0]).to_pylist() == report.bounds
    whole = job.run(killed_spec(), context(data)[0])
    assert whole is not None
    # Batches of other sizes and other processes may round otherwise.
    assert result["mean_width"] == pytest.approx(whole["mean_width"])
    for key in ("verdicts", "certified_accuracy"):
        assert result[key] == whole[key]
    for found, expected in zip(result["layers"], whole["layers"], strict=True):
        assert found == {
            name: pytest.approx(value) if isinstance(value, float) else value for name, value in expected.items()
        }


def first_attempt(folder: str) -> None:
    """Run the job in a process that is killed as soon as it has written some rows."""
    data, add = DataLayout(Path(folder)), ResumeLog.add

    def last(log: ResumeLog, entries: list[DecidedRow]) -> None:
        add(log, entries)
        if len(written(data)) == DONE:
            os.kill(os.getpid(), signal.SIGKILL)

    ResumeLog.add = last  # type: ignore[method-assign]
    ranked, _ = context(data, job_id=JOB)
    job.run(killed_spec(), ranked)


def test_a_torn_line_is_not_taken(tmp_path: Path) -> None:
    first = ResumeLog(tmp_path, 1, 0)
    first.add([entry(0), entry(2)])
    with (tmp_path / "rows-1-0.jsonl").open("a") as file:
        file.write('{"row": {"instance": 4, "ver')
    ResumeLog(tmp_path, 1, 1).add([entry(1)])
    second = ResumeLog(tmp_path, 2, 0)
    assert sorted(second.earlier()) == [0, 1, 2]
    second.add([entry(4)])
    assert sorted(second.earlier()) == [0, 1, 2]
    assert sorted(second.everything()) == [0, 1, 2, 4]


def test_an_attempt_does_not_take_what_a_later_one_or_itself_wrote(tmp_path: Path) -> None:
    ResumeLog(tmp_path, 3, 0).add([entry(0, "unknown")])
    ResumeLog(tmp_path, 2, 0).add([entry(0)])
    assert ResumeLog(tmp_path, 2, 0).earlier() == {}
    assert ResumeLog(tmp_path, 2, 1).everything()[0].row.verdict == "verified"
    assert ResumeLog(tmp_path, 4, 0).earlier()[0].row.verdict == "unknown", "of two attempts, the later"
