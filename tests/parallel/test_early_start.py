"""Threads that start a CUDA device: what they do here, where there is none, is nothing that anybody sees."""

from __future__ import annotations

import threading

import pytest
import torch

from service.parallel import early_start
from service.parallel.distributed import Launch


def join_all() -> None:
    for thread in threading.enumerate():
        if thread.name == "trivet-device":
            thread.join(30)


def test_a_cpu_rank_starts_no_thread() -> None:
    before = threading.active_count()
    early_start.begin_context("cpu", Launch())
    early_start.begin_products(torch.device("cpu"))
    assert threading.active_count() == before


def test_a_device_that_cannot_be_started_is_left_to_who_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_start, "_DRIVER", "no-such-driver.so")
    failed = list[object]()
    monkeypatch.setattr(threading, "excepthook", failed.append)
    early_start.begin_context("cuda", Launch())
    early_start.begin_products(torch.device("cuda", 99))
    join_all()
    assert failed == []


def test_what_is_used_once_is_there_for_every_device() -> None:
    early_start.use_once(torch.device("cpu"))
