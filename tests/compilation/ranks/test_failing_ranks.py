"""A compiler that fails on one rank: the others, which wait for it in a collective, are freed, and its name is told."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ladder_runs import quick_plan
from waiting import eventually

pytestmark = pytest.mark.distributed
JOB = "job_" + "0" * 20


def check_with_one_bad_compiler(parallel: dict[str, int], bad: int, folder: str) -> Any:
    """A job whose second rung has a compiler that crashes on rank ``bad``; what it returned, and after how long."""
    import torch.distributed as dist

    from service.compilation import job, phase_observer, rungs
    from service.compilation.ranks import group
    from service.compilation.selftest import backends
    from service.jobs.files import DataLayout
    from service.jobs.runtime import NullReporter, RunContext
    from service.jobs.spec.compile import CompileSpec
    from service.parallel import distributed

    job.plan_run = quick_plan
    limits = group.WaitLimits(failed_s=3.0)
    phase_observer.collective_attempt = partial(group.collective_attempt, limits=limits)
    job.self_test = tuple  # type: ignore[assignment]  # has tests of its own, and takes its time
    distributed.start("cpu")
    rank = dist.get_rank()
    if rank == bad:
        broken = {"aot_eager": rungs.Rung("aot_eager", backends.crashes)}
        rungs.LADDER = tuple(broken.get(rung.name, rung) for rung in rungs.LADDER)
    spec = CompileSpec.model_validate(
        {
            "model": {"family": "mlp", "in_features": 8, "hidden": [8, 8], "out_features": 4},
            "parallel": parallel,
            "modes": ["eager", "aot_eager", "aot_eager_decomp_partition"],
            "shapes": [4],
            "steps": 3,
        }
    )
    context = RunContext(JOB, 1, rank, rank, 2, "cpu", DataLayout(Path(folder)), NullReporter(), bool)
    began = time.monotonic()
    result = job.run(spec, context)
    distributed.stop()
    return result, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "bad"),
    [
        pytest.param({"dp_shard": 2}, 1, id="rank 1 under FSDP2"),
        pytest.param({"tp": 2}, 0, id="rank 0 of tp"),
    ],
)
def test_the_rank_is_named_and_nobody_is_left_waiting(
    torchrun: Callable[..., list[Any]], tmp_path: Path, parallel: dict[str, int], bad: int
) -> None:
    (result, seconds), (other, _) = torchrun(
        check_with_one_bad_compiler, 2, parallel=parallel, bad=bad, folder=str(tmp_path)
    )
    assert other is None
    assert result["verdicts"] == {"pass": 1, "fail_error": 1, "not_reached": 4}
    report = json.loads((tmp_path / "jobs" / JOB / "artifacts" / "report.json").read_text())
    (finding,) = report["rungs"][1]["findings"]
    assert finding["verdict"] == "fail_error"
    assert finding["message"].startswith(f"rank {bad}: BackendCompilerFailed")
    assert "planted" in finding["message"]
    for row in report["rungs"][2:]:
        assert row["findings"][0]["message"] == "the ranks lost each other at aot_eager of train"
    assert report["diagnoses"] == []
    assert seconds < 500


def meet_late(waits: float, folder: str) -> Any:
    """Rank 1 comes when the other has given it up, or fails where nobody misses it: what each rank makes of it."""
    import torch.distributed as dist

    from service.compilation.ranks import group
    from service.parallel import distributed

    distributed.start("cpu")
    rank = dist.get_rank()
    _, both = group.collective_attempt(lambda: "planted" if rank else "", str)
    limits, given_up = group.WaitLimits(done_s=waits), Path(folder, "given up")
    try:
        group.collective_attempt(lambda: eventually(given_up.exists) if rank else None, lambda _: "", limits)
        lost = ""
    except group.GroupLostError as error:
        lost = str(error)
        given_up.touch()
    alone = not dist.is_initialized()
    distributed.stop()
    return both, lost, alone


@pytest.mark.slow
def test_a_rank_that_never_ends_is_left_behind_and_one_that_nobody_misses_is_not(
    torchrun: Callable[..., list[Any]], tmp_path: Path
) -> None:
    first, second = torchrun(meet_late, 2, waits=1.0, folder=str(tmp_path))
    assert first[0] == second[0] == ["", "planted"]
    assert first[1:] == ["rank 1: did not end within 1 s of the others", True]
    assert second[2]


def begin_late() -> Any:
    """The last of four ranks begins when others that need not wait for it would have given it up."""
    import torch.distributed as dist

    from service.compilation.ranks import group
    from service.parallel import distributed

    distributed.start("cpu")
    rank, limits = dist.get_rank(), group.WaitLimits(done_s=1.0, failed_s=1.0)
    dist.barrier()
    time.sleep(3.0 if rank == 3 else 0.0)
    found = group.collective_attempt(lambda: "planted" if rank == 0 else "", str, limits)
    distributed.stop()
    return found[1]


@pytest.mark.slow
def test_a_rank_that_begins_late_is_not_missed_by_those_that_have_ended(torchrun: Callable[..., list[Any]]) -> None:
    assert torchrun(begin_late, 4) == [["planted", "", "", ""]] * 4
