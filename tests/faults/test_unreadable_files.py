"""Files that a crash or a loss of power cut short: the next attempt goes on, and what can be known is not lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.jobs.events import BoundsRow
from service.jobs.files import DataLayout
from service.jobs.store import Store
from service.training.history import History
from service.verification.results import DecidedRow, ResumeLog

STEPS = 6


def recorded(attempts: Path, number: int, steps: range, loss: float, torn: bool = False) -> None:
    """The events of an attempt as its supervisor keeps them."""
    folder = attempts / str(number)
    folder.mkdir(parents=True)
    events = [
        {"type": "metric", "step": step, "time": float(step), "rank": 0, "values": {"loss": loss}} for step in steps
    ]
    lines = [json.dumps({"type": "log", "line": '"metric"', "time": 0.0, "rank": 0}), *map(json.dumps, events)]
    text = "\n".join(lines) + "\n"
    (folder / "events.jsonl").write_text(text[:-20] if torn else text)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1", bytes(4096)])
def test_an_unreadable_metrics_file_is_set_aside_and_its_rows_come_from_the_records(
    tmp_path: Path, content: bytes
) -> None:
    """Once it failed every retry of its job with an error of Arrow's."""
    path = tmp_path / "artifacts" / "metrics.parquet"
    path.parent.mkdir()
    path.write_bytes(content)
    recorded(tmp_path / "attempts", 1, range(1, 6), loss=1.0, torn=True)
    recorded(tmp_path / "attempts", 2, range(4, STEPS + 3), loss=2.0)
    history = History(path, STEPS, tmp_path / "attempts")
    assert [(row["step"], row["loss"]) for row in history.rows] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
    assert "metrics.parquet cannot be read" in str(history.unreadable)
    assert path.with_name("metrics.parquet.unreadable").read_bytes() == content
    history.add(STEPS + 1, {"loss": 3.0})
    history.write()
    assert pq.read_table(path).column("step").to_pylist() == list(range(1, STEPS + 2))


def test_a_metrics_file_that_is_not_ours_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.parquet"
    import pyarrow as pa

    pq.write_table(pa.table({"other": [1]}), path)
    assert History(path, 1).rows == []
    assert not path.exists()


@given(written=st.integers(0, STEPS))
def test_a_file_that_is_older_than_the_checkpoint_is_completed(
    tmp_path_factory: pytest.TempPathFactory, written: int
) -> None:
    """The process ended between the two; rows of the file are kept as they are."""
    folder = tmp_path_factory.mktemp("job")
    path = folder / "artifacts" / "metrics.parquet"
    first = History(path, 0)
    for step in range(1, written + 1):
        first.add(step, {"loss": 7.0, "eval_loss": 8.0})
    if written:
        first.write()
    recorded(folder / "attempts", 1, range(1, STEPS + 1), loss=7.0)
    history = History(path, STEPS, folder / "attempts")
    assert [row["step"] for row in history.rows] == list(range(1, STEPS + 1))
    assert [row.get("eval_loss") for row in history.rows[:written]] == [8.0] * written
    assert history.unreadable is None


def test_a_draft_that_a_killed_rank_left_is_removed(tmp_path: Path) -> None:
    draft = tmp_path / ".metrics.parquet.0123.part"
    draft.write_bytes(b"half")
    History(tmp_path / "metrics.parquet", 3)
    assert not draft.exists()


@pytest.mark.parametrize("damage", [b"\x00" * 64 + b"\n", b"{}\n", b"[1]\n", b'{"row": {"inst'])
def test_a_damaged_record_of_rows_costs_only_what_it_held(tmp_path: Path, damage: bytes) -> None:
    for instance in range(2):
        row = BoundsRow(
            instance=instance, verdict="verified", lower=[], upper=[], margin=1.0, method="crown", seconds=0.5,
            domains=1, counterexample=None,
        )  # fmt: skip
        ResumeLog(tmp_path, 1, instance).add([DecidedRow(row, [])])
    with (tmp_path / "rows-1-0.jsonl").open("ab") as file:
        file.write(damage)
    assert sorted(ResumeLog(tmp_path, 2, 0).earlier()) == [0, 1]


_KILLED = """
import os, sys
from pathlib import Path
from service.jobs.files import DataLayout
from service.jobs.store import Store
writer = Store.connect(sys.argv[1], DataLayout(Path(sys.argv[2]))).files.writer()
writer.write(b"x" * 10_000)
writer._file.flush()
os._exit(9)
"""


def test_an_upload_whose_process_was_killed_is_deleted_after_a_while(broker: str, data: DataLayout) -> None:
    """One that is being written stays, as does what was uploaded."""
    subprocess.run([sys.executable, "-c", _KILLED, broker, str(data.root)], check=False)
    (left,) = data.files.glob("upload-*")
    store = Store.connect(broker, data)
    try:
        kept = store.files.add([b"whole"], "text/plain")
        assert store.files.delete_abandoned() == []
        os.utime(left, times=(time.time() - 7200,) * 2)
        os.utime(data.file(kept.id), times=(time.time() - 7200,) * 2)
        with store.files.writer() as writer:
            assert store.files.delete_abandoned() == [left]
            writer.write(b"more")
            writer.commit("text/plain")
        assert store.files.get(kept.id)[1].read_bytes() == b"whole"
        assert list(data.files.glob("upload-*")) == []
    finally:
        store.close()
