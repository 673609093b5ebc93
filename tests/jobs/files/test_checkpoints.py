"""Folders of checkpoints in which a job may have left anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from service.jobs.files import (
    DESCRIPTION,
    FILES,
    META,
    WEIGHTS,
    JobPaths,
    checkpoints,
    complete,
    finished,
    read,
    steps_of_weights,
)


def leave(folder: Path, step: int | str, text: str | None = None) -> Path:
    place = folder / f"step_{step}"
    place.mkdir(parents=True)
    (place / META).write_text(json.dumps({FILES: {}, "padding": "x" * 200}) if text is None else text)
    return place


def test_of_any_number_of_descriptions_only_so_many_bytes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lists a job's artifacts reads them, in the API."""
    one = leave(tmp_path, 1)
    for step in range(2, 40):
        leave(tmp_path, step, "").joinpath(META).unlink()
        (tmp_path / f"step_{step}" / META).hardlink_to(one / META)
    assert [each.step for each in complete(tmp_path)] == list(range(1, 40))
    monkeypatch.setattr(checkpoints, "_MOST_META", 1000)
    assert [each.step for each in complete(tmp_path)] == [36, 37, 38, 39]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"files": {"a": "x"}}', "[]", "1" * 5000, '{"files": 3}'])
def test_what_is_no_description_makes_no_checkpoint(tmp_path: Path, text: str) -> None:
    leave(tmp_path, 7)
    assert read(leave(tmp_path, 8, text)) is None
    assert [each.step for each in complete(tmp_path)] == [7]


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[1]", "{}", '{"step": "7"}', '{"step": true}', '{"step": -1}'])
def test_what_describes_no_model_leaves_no_weights(paths: JobPaths, text: str) -> None:
    """Whatever a shared job has left there, the job that names it is refused in words."""
    (paths.artifacts / WEIGHTS).write_bytes(b"")
    (paths.artifacts / DESCRIPTION).write_text(text)
    assert steps_of_weights(paths) == ()
    (paths.artifacts / DESCRIPTION).write_text('{"step": 7}')
    assert steps_of_weights(paths) == (7,)


def test_a_step_is_a_number_that_records_can_hold(tmp_path: Path) -> None:
    leave(tmp_path, "9" * 200)
    leave(tmp_path, "٣")
    assert complete(tmp_path) == []


def test_a_model_whose_description_is_nested_without_end_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "model.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        finished(tmp_path)
