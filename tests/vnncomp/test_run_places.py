"""Ranks without a service: each on a GPU of its own as far as there are any, and with its share of the cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trivet.vnncomp.run_places import THREADS, VISIBLE, RunPlaces


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, as the driver's tool lists them."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho GPU-a\necho GPU-b\n")
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in (VISIBLE, THREADS):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("host")
def test_ranks_at_a_time_are_spread_over_the_gpus_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    places = RunPlaces.here("auto", 3)
    with places.taken() as first, places.taken() as second:
        assert {first.device, second.device} == {"cuda"}
        assert {first.variables[VISIBLE], second.variables[VISIBLE]} == {"GPU-a", "GPU-b"}
        assert first.variables[THREADS] == str(max(1, len(os.sched_getaffinity(0)) // 3))
    with places.taken() as held:
        for _ in range(2):
            with places.taken() as third:
                assert third.variables[VISIBLE] != held.variables[VISIBLE]
    monkeypatch.setenv(VISIBLE, "1, 3")
    monkeypatch.setenv(THREADS, "5")
    with RunPlaces.here("cuda", 3).taken() as chosen:
        assert chosen.variables == {VISIBLE: "1"}


@pytest.mark.usefixtures("host")
def test_a_rank_alone_has_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    with RunPlaces.here("cpu").taken() as place:
        assert (place.device, place.variables) == ("cpu", {})
    monkeypatch.setenv(VISIBLE, "")
    with RunPlaces.here("auto").taken() as place:
        assert (place.device, place.variables) == ("cpu", {})
