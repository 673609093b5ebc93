"""What ranks say of their devices while they train."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from training_runs import MLP, Recording, train

from service.training import step_totals
from service.training.step_totals import DeviceMeter, DeviceUse, RankShare, StepReduction, metrics_of


def test_a_rank_on_a_cpu_is_measured_by_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = DeviceMeter(torch.device("cpu"))
    assert not meter.refresh(), "the time for it has not come"
    assert meter.latest == DeviceUse()
    monkeypatch.setattr(step_totals, "EVERY_S", 0.0)
    began, spent = time.monotonic(), time.process_time()
    while time.process_time() - spent < 0.02:
        pass
    assert meter.refresh()
    assert 0 < meter.latest.busy <= (os.cpu_count() or 1)
    assert meter.latest.busy * (time.monotonic() - began) >= 0.01
    assert meter.latest.held_gib > 0.05, "torch alone has more"


def test_the_use_of_all_devices_is_known_after_a_step() -> None:
    share = RankShare(torch.tensor(0.5), torch.tensor(1.0), stop=False, device_busy=0.75, held_gib=2.5, power_w=300.0)
    assert StepReduction(share).read(step=1).devices == (DeviceUse(0.75, 2.5, 300.0),)


def test_power_that_nobody_measures_is_no_metric() -> None:
    assert metrics_of((DeviceUse(0.5, 1.0, 250.0), DeviceUse(0.25, 2.0))) == {
        "device_busy.0": 0.5,
        "device_memory_gib.0": 1.0,
        "device_power_w.0": 250.0,
        "device_busy.1": 0.25,
        "device_memory_gib.1": 2.0,
    }


def test_a_training_reports_its_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_totals, "EVERY_S", 0.0)
    report = Recording()
    train(tmp_path, {**MLP, "steps": 3}, report=report)
    assert len(report.series("device_busy.0")) == 2, "the first step has nothing to tell yet"
    assert min(report.series("device_memory_gib.0")) > 0.05
