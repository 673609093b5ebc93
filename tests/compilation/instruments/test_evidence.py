"""What is read of the compiler, and what detectors make of evidence of CUDA graphs, with and without a device."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from ladder_runs import Ascend
from programs import clean
from torch._dynamo.callback import CallbackTrigger, callback_handler
from torch._inductor import cudagraph_utils

from service.compilation.detectors import judge
from service.compilation.evidence import CompilerEvidence, CudaGraphs, Reason
from service.compilation.instruments import cudagraphs
from service.compilation.instruments.cudagraphs import watched_captures
from service.compilation.instruments.profile import Profile, record_profile
from service.compilation.instruments.recorder import recorder
from service.compilation.judgement import Result
from service.compilation.monitor.usage import Usage
from service.compilation.report.rows import rung_row
from service.compilation.run.observation import Cost, Observation, RungCase, Timed
from service.compilation.run.timing import Race
from service.compilation.rungs import LADDER, RUNGS

CPU = torch.device("cpu")
CASE = RungCase(RUNGS["reduce-overhead"], "inference")


def seen(graphs: CudaGraphs, launches: float | None = 2.0, share: float = 0.5) -> Observation:
    profile = Profile(9.0, 1.0, 1e-3, launches=4.0, graph_launches=launches, busy_s=1e-3)
    timed = Timed(Race(1.0, 1.0, 1.0, noisy=False, faster=False), profile, compiled_share=share)
    cost = Cost(1.0, 1.0, timed, None, None)
    return Observation(CASE, CompilerEvidence(graphs=1, operations=3, cuda_graphs=graphs), cost=cost)


def messages(observation: Observation) -> list[str]:
    return [f"{finding.verdict}: {finding.message}" for finding in judge(observation)]


def test_graphs_that_are_captured_and_launched_are_no_finding() -> None:
    assert messages(seen(CudaGraphs(captures=2))) == []
    assert messages(seen(CudaGraphs(captures=2), launches=None)) == []


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (
            seen(CudaGraphs(skips=(Reason("mutated inputs"),))),
            "vacuous: no CUDA graph was captured: mutated inputs",
        ),
        (seen(CudaGraphs()), "vacuous: no CUDA graph was captured: no reason was given"),
        (
            seen(CudaGraphs(captures=2), launches=0.0),
            "vacuous: 2 CUDA graphs were captured, and none is launched in a step after warm-up",
        ),
        (
            seen(CudaGraphs(captures=9, late=(5, 6), rerecords=(Reason("function 1: a static input changed", 4),))),
            "unstable: still recording CUDA graphs after warm-up, in 2 iterations from 5 on: "
            "function 1: a static input changed (4×)",
        ),
        (
            seen(CudaGraphs(captures=2), share=0.004),
            "vacuous: only 0.4% of a step's operators run in compiled code",
        ),
    ],
)
def test_graphs_that_are_not_what_they_seem_are_found(observation: Observation, message: str) -> None:
    assert messages(observation) == [message]


def test_recordings_and_skips_are_heard_by_iteration() -> None:
    with watched_captures() as captures:
        cudagraph_utils.log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to cpu device (arg0_1)")
        assert not captures.end_iteration()
        with callback_handler.install_callbacks(CallbackTrigger.CUDAGRAPH_RECORDING, "0/0"):
            pass
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
            pass
        assert captures.end_iteration()
    found = captures.evidence(CPU, steady=1)
    assert found.captures == 1
    assert found.skips == (Reason("cpu device (arg0_1)"),)
    assert found.late == (1,)
    assert captures.evidence(CPU, steady=2).late == ()


def test_recordings_are_told_by_shape_and_errors_of_overwritten_results_by_themselves() -> None:
    small, large = frozenset({((2, 6),)}), frozenset({((4, 6),)})
    usage = Usage(iterations=4, shapes={"scorer": (small, large, small, large)})
    graphs = CudaGraphs(captures=5, recorded=(0, 1, 1, 2, 1), rerecords=(Reason("function 1: an input moved", 2),))
    error = "RuntimeError: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run"
    row = rung_row(Result(CASE, "fail_error", (), replace(seen(graphs), usage=usage, error=error)))["cudagraph"]
    assert row["by_shape"] == [
        {"shapes": "scorer [4, 6]", "captures": 3},
        {"shapes": "scorer [2, 6]", "captures": 1},
        {"shapes": "after the judged iterations", "captures": 1},
    ]
    assert row["rerecords"] == [{"reason": "function 1: an input moved", "count": 2}]
    assert row["errors"] == [error]
    assert rung_row(Result(CASE, "fail_error", (), replace(seen(graphs), error="another")))["cudagraph"]["errors"] == []


class Function(NamedTuple):
    id: int


def test_what_the_trees_recorded_again_is_counted_by_function(monkeypatch: pytest.MonkeyPatch) -> None:
    function = Function(7)
    manager = SimpleNamespace(graph_counter=count(4), num_rerecord={None: {function: 2}, 3: {function: 1}})
    monkeypatch.setattr(cudagraphs, "_manager", lambda device: manager)
    with watched_captures() as captures:
        found = captures.evidence(CPU, steady=1)
    assert found.captures == 4  # that were numbered, although no callback told of them
    (again,) = found.rerecords
    assert (again.count, again.reason.partition(":")[0]) == (3, "function 7")


def test_functions_of_fsdp_in_a_graph_are_named() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * _fsdp_common._get_dim0_padded_size(torch.Size([3]), 2)[0]

    with recorder(RUNGS["eager"], CPU) as records:
        torch.compile(step, backend="eager")(torch.ones(2))
        torch.compile(lambda x: step(x) + step(x), backend="eager")(torch.ones(2))
    (hook,) = records.evidence(1, 1).hooks
    assert "_get_dim0_padded_size" in hook.reason
    assert hook.count == 3
    row = rung_row(Result(CASE, "pass", (), Observation(CASE, records.evidence(1, 1))))
    assert row["hooks_traced"] == 3
    assert row["hooks"] == [{"reason": hook.reason, "count": 3}]
    torch.compiler.reset()


def test_operators_outside_of_compiled_code_are_counted_however_long_they_take() -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.sin(x))

    def slow(x: torch.Tensor) -> None:
        time.sleep(0.02)  # as where other programs have the processor
        work(x)

    x = torch.ones(3)
    compiled = torch.compile(work, backend="eager")
    compiled(x)
    steps = (lambda: compiled(x), lambda: work(x), lambda: (compiled(x), slow(x)))
    counts = [record_profile(step, 3, CPU)() for step in steps]
    assert [(each.operators, each.uncompiled) for each in counts] == [(2, 0), (2, 2), (4, 2)]
    assert counts[0].graph_launches is None
    torch.compiler.reset()


def test_the_last_rung_does_not_apply_without_a_device(ascend: Ascend) -> None:
    (*_, last) = ascend(clean.PERCEPTRON, rungs=[RUNGS["eager"], RUNGS["reduce-overhead"]])
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert last.verdict == "not_applicable"
    assert last.observation is None
    assert "CUDA graphs need a CUDA device" in last.findings[0].message


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("phase", ["train", "inference"])
def test_cuda_graphs_are_captured_and_launched_on_a_device(ascend: Ascend, phase: str) -> None:
    results = ascend(clean.on("cuda", clean.PERCEPTRON), rungs=LADDER, phases=(phase,))
    assert [result.verdict for result in results] == ["pass"] * 5, [result.findings for result in results]
    graphs = results[-1].observation.evidence.cuda_graphs  # type: ignore[union-attr]
    assert graphs is not None
    assert graphs.captures >= (2 if phase == "train" else 1)
