"""A program of an installed package: several modules, checked as its own loop calls them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "tests" / "plugins" / "example_package"
JOB = "job_" + "3" * 20

CHECK = f"""
import gc, json, sys
from pathlib import Path
from pydantic import ValidationError
from service.compilation import job
from service.compilation.selftest import Proof
from service.jobs.submission.check import check
from service.jobs.plugins import CheckContext
from service.jobs.kinds.listing import all_kinds
from service.jobs.files import DataLayout
from service.jobs.runtime import NullReporter, RunContext
from service.jobs.spec.compile import CompileSpec

def refusal(**fields):
    try:
        spec = CompileSpec.model_validate(fields)
    except ValidationError as error:
        return error.errors()[0]["msg"]
    return [problem.path for problem in check(spec, CheckContext())]

job.self_test = lambda: (Proof("none", "nothing", False, ""),)  # other tests ask about it
allocator = {{"name": "allocator", "rounds": 3}}
modes = ["eager", "aot_eager", "reduce-overhead"]
spec = CompileSpec.model_validate({{"program": allocator, "modes": modes, "steps": 4}})
spec = CompileSpec.model_validate_json(spec.model_dump_json(by_alias=True))  # as it comes to a rank
layout = DataLayout(Path(sys.argv[1]))
context = RunContext("{JOB}", 1, 0, 0, 1, "cpu", layout, NullReporter(), lambda: False)
gc.collect()
gc.freeze()  # what was imported holds no results, and there is much of it to be searched
print(json.dumps({{
    "result": job.run(spec, context),
    "programs": [each.name for each in all_kinds().programs],
    "on two ranks": refusal(program=allocator, parallel={{"dp_shard": 2}}),
    "with shapes": refusal(program=allocator, shapes=[4]),
    "written by an older version": refusal(program=allocator, shapes=[16]),
    "both": refusal(program=allocator, model={{"family": "mlp", "in_features": 2, "hidden": [2], "out_features": 2}}),
    "typo": refusal(program={{"name": "allocator", "round": 3}}),
}}))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process says that finds the package installed, and the report that it left."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(EXAMPLE / "trivet_example", folder / "trivet_example")
    information = folder / "trivet_example-1.2.3.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: trivet-example\nVersion: 1.2.3\n")
    (information / "entry_points.txt").write_text("[trivet.programs]\nallocator = trivet_example.declared:PROGRAM\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(folder / "data")],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["report"] = json.loads((folder / "data" / "jobs" / JOB / "artifacts" / "report.json").read_text())
    return found


@pytest.mark.slow
def test_every_module_is_compiled_and_counted_as_the_loop_calls_it(answers: dict[str, Any]) -> None:
    assert answers["result"]["verdicts"] == {"pass": 4, "not_applicable": 2}, answers["report"]["rungs"]
    compiled = [row for row in answers["report"]["rungs"] if row["verdict"] == "pass"]
    for row in compiled:
        calls = {call["module"]: call["calls"] for call in row["invocations"]}
        times = 2 if row["phase"] == "train" else 1  # from one state, and free
        assert calls == {"encoder": 4 * times, "scorer": 12 * times}
        assert {call["module"]: call["per_step"] for call in row["invocations"]} == {"encoder": 1, "scorer": 3}
        assert row["graphs"] == 2
        assert row["lifetimes"] == []
    trained = next(row for row in answers["report"]["rungs"] if row["rung"] == "aot_eager" and row["phase"] == "train")
    assert trained["parameters"]["moved"] == trained["parameters"]["trainable"] == 6
    assert min(trained["parameters"]["compiled_backwards"]) == 4


def test_its_loop_raises_no_alarm_when_cuda_graphs_are_rehearsed(answers: dict[str, Any]) -> None:
    rehearsed = [row["findings"] for row in answers["report"]["rungs"] if row["rung"] == "reduce-overhead"]
    assert [len(findings) for findings in rehearsed] == [1, 1], rehearsed
    assert all("CUDA graphs need a CUDA device" in finding["message"] for (finding,) in rehearsed)


def test_its_gate_holds_for_its_configuration_and_its_package(answers: dict[str, Any]) -> None:
    own = answers["result"]["gate"]["fingerprint"]
    assert own["program.name"] == "allocator"
    assert own["program.rounds"] == 3
    assert own["program.package"] == "trivet-example 1.2.3"
    assert len(own["program.sources"]) == 16
    assert own["parallel.tp"] == 1


def test_it_is_listed_and_checked_at_submit(answers: dict[str, Any]) -> None:
    assert answers["programs"] == ["exported", "allocator"]
    assert answers["on two ranks"] == ["parallel"]
    assert "shapes describes a model" in answers["with shapes"]
    assert answers["written by an older version"] == []
    assert "got both" in answers["both"]
    assert "Extra inputs are not permitted" in answers["typo"]
