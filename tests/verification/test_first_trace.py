"""The process that jobs are forked from has traced a network, and can still be forked."""

from __future__ import annotations

import runpy
import subprocess
import sys
import threading
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from service.bounds import capture as capturing
from service.bounds.graph import Graph
from service.jobs.kinds.registry import KINDS

MODULE = "service.verification.first_trace"


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    graphs: list[Graph] = []
    capture = capturing.capture

    def noted(module: nn.Module, shape: Any) -> Graph:
        graphs.append(capture(module, shape))
        return graphs[-1]

    monkeypatch.setattr(capturing, "capture", noted)
    return graphs


def test_its_import_traces_what_most_networks_have_and_starts_no_thread(
    traced: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    before = set(threading.enumerate())
    runpy.run_module(MODULE)
    (graph,) = traced
    assert {"aten.linear.default", "aten.relu.default"} <= {node.operator for node in graph.nodes}
    assert set(threading.enumerate()) == before


def test_a_torch_that_asks_the_driver_is_left_alone(traced: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    runpy.run_module(MODULE)
    assert traced == []


def test_what_kinds_have_imported_beforehand_is_there() -> None:
    """A module that cannot be imported there is left to the ranks, and nobody would notice."""
    named = [module for kind in KINDS.provided for module in KINDS.declaration(kind).preloads]
    assert MODULE in named
    assert [module for module in named if find_spec(module) is None] == []


WITHOUT_A_TRACE = """
import sys, torch
before = set(sys.modules)
import service.verification.job, service.bounds.onnx.model
from service.bounds.fused.lines import propagate_lines_in_steps
ones = torch.ones(1, 1, 2)
with torch.no_grad():
    propagate_lines_in_steps(ones, ones, ones, None, None)
print(sorted({"sympy", "torch.distributed.tensor", "service.models"} & (set(sys.modules) - before)))
"""


def test_a_file_whose_trace_is_kept_needs_nothing_that_traces() -> None:
    """It would be imported as long as torch is."""
    found = subprocess.run([sys.executable, "-c", WITHOUT_A_TRACE], capture_output=True, text=True, check=False)
    assert found.stdout == "[]\n", found.stderr
