"""An evaluation that was due at a checkpoint is there after any end of the attempt: recorded, or made up for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from training_runs import JOB, MLP, train

from service.jobs.files import DataLayout
from service.training import loop
from service.training.history import History

SPEC: dict[str, Any] = {**MLP, "steps": 6, "checkpoint": {"every": 2, "async": False}, "evaluate": {"every": 2}}


class EndedError(RuntimeError):
    """Stands for what ends an attempt."""


def evaluated(folder: Path) -> dict[int, float]:
    """The evaluations in the history of the job, by step."""
    rows = pq.read_table(DataLayout(folder).job(JOB).artifacts / "metrics.parquet").to_pylist()
    assert [row["step"] for row in rows] == list(range(1, SPEC["steps"] + 1))
    assert all(row["loss"] is not None for row in rows)
    return {row["step"]: row["eval_loss"] for row in rows if row["eval_loss"] is not None}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("whole")
    train(folder, SPEC, test_samples=20)
    found = evaluated(folder)
    assert list(found) == [2, 4, 6]
    return found


@pytest.mark.parametrize("step", [2, 4])
def test_what_ends_during_an_evaluation_evaluates_when_it_goes_on(
    tmp_path: Path, step: int, whole: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, seen = loop.evaluate, []

    def ended(training: Any) -> dict[str, float]:
        seen.append(0)
        if 2 * len(seen) == step:
            raise EndedError
        return evaluate(training)

    monkeypatch.setattr(loop, "evaluate", ended)
    with pytest.raises(EndedError):
        train(tmp_path, SPEC, test_samples=20)
    monkeypatch.undo()
    train(tmp_path, SPEC, test_samples=20)
    assert evaluated(tmp_path) == whole


def test_a_stop_at_a_step_that_is_evaluated_leaves_it_to_the_next_attempt(
    tmp_path: Path, whole: dict[int, float]
) -> None:
    assert train(tmp_path, SPEC, test_samples=20, stop_after=4)["eval_loss"] == [whole[2]]
    assert train(tmp_path, SPEC, test_samples=20)["eval_loss"] == [whole[4], whole[6]]
    assert evaluated(tmp_path) == whole


def recorded(folder: Path, attempt: int, *metrics: tuple[int, dict[str, float]], rank: int = 0) -> None:
    lines = [
        json.dumps({"type": "metric", "step": step, "time": float(step), "rank": rank, "values": values})
        for step, values in metrics
    ]
    (folder / str(attempt)).mkdir(parents=True, exist_ok=True)
    (folder / str(attempt) / f"events.rank-{rank}.jsonl").write_text("\n".join(lines) + "\n")


def test_an_evaluation_that_was_recorded_after_the_file_was_written_is_taken_up(tmp_path: Path) -> None:
    """As a kill leaves it after the evaluation of a checkpoint's step."""
    path = tmp_path / "artifacts" / "metrics.parquet"
    first = History(path, 0)
    for step in (1, 2):
        first.add(step, {"loss": float(step)})
    first.write()
    recorded(tmp_path / "attempts", 1, (1, {"loss": 1.0}), (2, {"loss": 2.0}), (2, {"eval_loss": 0.5}))
    history = History(path, 2, tmp_path / "attempts", evaluated=True)
    assert history.has_evaluation(2)
    assert [(row["loss"], row.get("eval_loss")) for row in history.rows] == [(1.0, None), (2.0, 0.5)]


def test_an_evaluation_that_was_made_up_for_keeps_the_row_of_its_step(tmp_path: Path) -> None:
    recorded(tmp_path / "attempts", 1, (1, {"loss": 1.0}), (2, {"loss": 2.0}))
    recorded(tmp_path / "attempts", 2, (2, {"eval_loss": 0.5}), (3, {"loss": 3.0}))
    rows = History(tmp_path / "metrics.parquet", 3, tmp_path / "attempts").rows
    assert [(row["loss"], row.get("eval_loss")) for row in rows] == [(1.0, None), (2.0, 0.5), (3.0, None)]


def test_what_ranks_report_of_the_use_of_their_stages_replaces_no_row(tmp_path: Path) -> None:
    """Neither that of another rank, in a file of its own, nor that of an evaluation that is made up for."""
    attempts, used = tmp_path / "attempts", {"calls/stage 1/train/4x8": 2.0}
    recorded(attempts, 1, (1, {"loss": 1.0}), (2, {"loss": 2.0}))
    recorded(attempts, 1, (1, used), rank=1)
    recorded(attempts, 2, (2, used), (2, {"eval_loss": 0.5}), (3, {"loss": 3.0}))
    rows = History(tmp_path / "metrics.parquet", 3, attempts).rows
    assert [row["loss"] for row in rows] == [1.0, 2.0, 3.0]
    assert (rows[0] | used, rows[1]["eval_loss"]) == (rows[0], 0.5)
