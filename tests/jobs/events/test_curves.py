"""Thinned curves beside the record of an attempt."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from service.jobs.events.curves import LEVELS, CurveKeeper, MetricSeries, read_curves


def written(folder: Path, steps: range, *, name: str = "loss", record: bytes = b"{}\n", rank: int = 0) -> Path:
    """An attempt that reported the sine of each step, and left its curves."""
    folder.mkdir(exist_ok=True)
    (folder / f"events.rank-{rank}.jsonl").write_bytes(record)
    keeper = CurveKeeper()
    for step in steps:
        keeper.take({"type": "metric", "time": 10.0 + step, "step": step, "values": {name: math.sin(step)}})
    keeper.write(folder, rank, {f"events.rank-{rank}.jsonl": len(record)})
    return folder


def read(*folders: Path, names: set[str] | None = None, most: int = 2000) -> dict[str, MetricSeries]:
    found = read_curves(folders, names, most)
    assert found is not None
    assert set(found[1]) <= set(found[0])
    return found[1]


def test_a_short_curve_is_whole_for_any_number_of_points(tmp_path: Path) -> None:
    folder = written(tmp_path, range(1, 2001, 10))
    for most in (1000, 100_000):
        assert read(folder, most=most)["loss"].step == list(range(1, 2001, 10))
    assert len(read(folder, most=20)["loss"].step) <= 20


def test_a_long_curve_keeps_its_ends_and_extremes_at_each_level(tmp_path: Path) -> None:
    folder = written(tmp_path, range(1, 30_001))
    values = [math.sin(step) for step in range(1, 30_001)]
    for most in LEVELS:
        curve = read(folder, most=most)["loss"]
        assert most / 2 < len(curve.step) <= most
        assert (curve.step[0], curve.step[-1]) == (1, 30_000)
        assert {min(values), max(values)} <= set(curve.value)
        assert all(later > earlier for earlier, later in zip(curve.step, curve.step[1:], strict=False))
    assert read_curves([folder], None, LEVELS[-1] + 1) is None


def test_what_is_not_finite_never_takes_the_place_of_a_number() -> None:
    odd = random.Random(3)
    values = [odd.choice([None, math.nan, -math.inf, odd.gauss(0, 1)]) for _ in range(9000)]
    keeper = CurveKeeper()
    for step, value in enumerate(values):
        keeper.take({"type": "metric", "time": 0.0, "step": step, "values": {"loss": value}})
    finite = [value for value in values if value is not None and math.isfinite(value)]
    kept = keeper.curve("loss").value
    assert not finite or {min(finite), max(finite)} <= set(kept)


def test_only_the_names_that_are_wanted_are_read(tmp_path: Path) -> None:
    written(tmp_path, range(5))
    folder = written(tmp_path, range(3), name="device_busy.1", rank=1)
    assert read_curves([folder], {"loss"}, 200) is not None
    assert set(read(folder, names={"loss"})) == {"loss"}
    assert set(read(folder)) == {"loss", "device_busy.1"}


def test_a_later_attempt_has_the_last_word_on_steps_that_it_repeats(tmp_path: Path) -> None:
    first, second = written(tmp_path / "1", range(1, 9)), written(tmp_path / "2", range(5, 7))
    assert read(first, second)["loss"].step == list(range(1, 9))
    long, resumed = written(tmp_path / "3", range(1, 10_001)), written(tmp_path / "4", range(9000, 9500))
    steps = read(long, resumed)["loss"].step
    assert len(steps) <= LEVELS[-1]
    assert steps[-1] == 10_000


@pytest.mark.parametrize("broken", ["longer record", "another rank", "no file", "a link", "not JSON", "no curve"])
def test_the_record_must_be_read_where_the_file_does_not_tell_all(tmp_path: Path, broken: str) -> None:
    folder = written(tmp_path / "1", range(3))
    file = folder / "curves.rank-0.jsonl"
    match broken:
        case "longer record":
            (folder / "events.rank-0.jsonl").write_bytes(b"{}\n{}\n")
        case "another rank":
            (folder / "events.rank-1.jsonl").write_bytes(b"{}\n")
        case "no file":
            file.unlink()
        case "a link":
            file.rename(tmp_path / "elsewhere")
            file.symlink_to(tmp_path / "elsewhere")
        case "not JSON":
            file.write_bytes(b"{")
        case "no curve":
            head, *_ = file.read_bytes().split(b"\n")
            file.write_bytes(head + b"\n" + json.dumps({"step": [], "time": [], "value": [1]}).encode())
    assert read_curves([folder], None, 200) is None
