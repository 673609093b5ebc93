"""Sweeps become the specs of jobs: every combination once, nothing else changed, and bad ones refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from digits import digits_job
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from service.jobs.kinds.registry import spec_adapter
from service.jobs.spec.common import SweepSpec
from service.jobs.spec.common.sweep import MOST_SWEPT
from service.jobs.submission.sweeps import NoPlace, expand, points

BASE = digits_job(16, 8, steps=10)
_paths = st.sampled_from(["steps", "optimizer.lr", "model.hidden.0", "labels.a", "seed", "batch.global"])
_values = st.integers(1, 9)


def swept(**sweep: Any) -> Any:
    return spec_adapter.validate_python({**BASE, "sweep": sweep})


@given(st.dictionaries(_paths, st.lists(_values, min_size=1, max_size=4, unique=True), min_size=1, max_size=4))
def test_a_grid_is_every_combination_once(grid: dict[str, list[int]]) -> None:
    found = list(points(SweepSpec(grid=grid)))
    assert {tuple(point.values()) for point in found} == set(itertools.product(*grid.values()))
    assert len(found) == len({tuple(point.values()) for point in found})
    assert all(list(point) == list(grid) for point in found)


@given(st.data(), st.integers(1, 5))
def test_a_zip_and_the_list_of_its_points_are_the_same(data: st.DataObject, length: int) -> None:
    values = st.lists(_values, min_size=length, max_size=length)
    axes = data.draw(st.dictionaries(_paths, values, min_size=1, max_size=4))
    found = list(points(SweepSpec(zip=axes)))
    assert len(found) == length
    assert {path: [point[path] for point in found] for path in axes} == axes
    assert list(points(SweepSpec(list=found))) == found


@given(st.lists(st.dictionaries(_paths, _values, min_size=1, max_size=6), min_size=1, max_size=5))
def test_a_job_of_a_sweep_is_the_spec_with_its_values_and_nothing_else_changed(chosen: list[dict[str, int]]) -> None:
    spec = swept(list=chosen)
    before = spec.model_dump(mode="json", by_alias=True)
    for point, job in zip(chosen, expand(spec), strict=True):
        body = spec_adapter.validate_python(
            {**job.body, "labels": {key: str(value) for key, value in job.body.get("labels", {}).items()}}
        ).model_dump(mode="json", by_alias=True)
        assert job.parameters == point
        for path, value in point.items():
            place: Any = body
            for name in path.split("."):
                place = place[int(name)] if isinstance(place, list) else place[name]
            assert float(place) == value
        same = set(before) - {path.partition(".")[0] for path in point} - {"sweep", "name"}
        assert {name: body[name] for name in same} == {name: before[name] for name in same}
        assert body["sweep"] is None
    assert spec.model_dump(mode="json", by_alias=True) == before


def test_names_say_the_values() -> None:
    named = spec_adapter.validate_python(
        {**BASE, "name": "lr", "sweep": {"grid": {"optimizer.lr": [0.1], "seed": [1]}}}
    )
    assert [job.body["name"] for job in expand(named)] == ["lr: optimizer.lr=0.1, seed=1"]
    assert [job.body["name"] for job in expand(swept(list=[{"name": "own"}]))] == ["own"]


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ({}, "none is given"),
        ({"grid": {"seed": [1]}, "zip": {"seed": [1]}}, "grid and zip is given"),
        ({"zip": {"seed": [1, 2], "steps": [1]}}, "it has 1 values, and seed has 2"),
        ({"grid": {"seed": list(range(40)), "steps": list(range(1, 40))}}, "it makes 1560 jobs"),
        ({"grid": {"kind": ["train"]}}, "all jobs of a sweep share it"),
        ({"list": [{"sweep.grid": {}}]}, "all jobs of a sweep share it"),
        ({"grid": {"model": [{}], "model.hidden": [[1]]}}, "it lies within model"),
        ({"grid": {"seed": []}}, "at least 1 item"),
        ({"grid": {"seed": [1]}, "best": {"metric": "loss", "mode": "least"}}, "'min' or 'max'"),
        ({"list": [{"seed": 1}] * (MOST_SWEPT + 1)}, "at most 1000"),
        ({"grid": {"checkpoint.every": [1, 10**30]}}, r"grid.`checkpoint\.every`.1\n.*64-bit"),
        ({"list": [{"labels": {"a": "\ud800"}}]}, "surrogates not allowed"),
        ({"random": {"fields": {"seed": [2**64]}, "jobs": 1}}, "64-bit"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(sweep: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        swept(**sweep)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("model.hidden.2", "no position in a list of 2"),
        ("model.hidden.x", "no position"),
        ("steps.x", "'x' would be a part of 10"),
        ("model.hidden.0.y", "'y' would be a part of 16"),
    ],
)
def test_a_path_to_nowhere_is_refused(path: str, said: str) -> None:
    with pytest.raises(NoPlace, match=said) as refusal:
        list(expand(swept(list=[{path: 1}])))
    assert refusal.value.path == path


@given(seed=st.integers(0, 9), log=st.booleans(), whole=st.booleans())
def test_a_random_sweep_draws_within_its_ranges_and_the_same_by_a_seed(seed: int, log: bool, whole: bool) -> None:
    fields = {"batch.global": {"low": 3, "high": 7, "log": log, "whole": whole}, "model.hidden.0": [8, 16]}
    asked = SweepSpec.model_validate({"random": {"fields": fields, "jobs": 40, "seed": seed}})
    found = list(points(asked))
    assert found == list(points(asked))
    drawn = [point["batch.global"] for point in found]
    assert all(3 <= each <= 7 and isinstance(each, int if whole else float) for each in drawn)
    assert len(set(drawn)) > 3
    assert {point["model.hidden.0"] for point in found} == {8, 16}
    other = SweepSpec.model_validate({"random": {"fields": fields, "jobs": 40, "seed": seed + 1}})
    assert found != list(points(other))


@pytest.mark.parametrize(
    ("drawn", "said"),
    [
        ({"low": 2, "high": 1}, "high: low is 2"),
        ({"low": 0, "high": 1, "log": True}, "low: log=true takes its logarithm"),
        ({"low": 0.5, "high": 2, "whole": True}, "whole: low and high are drawn, too"),
        ([], "at least 1"),
    ],
)
def test_a_range_that_is_none_is_refused(drawn: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        SweepSpec.model_validate({"random": {"fields": {"seed": drawn}, "jobs": 2}})
