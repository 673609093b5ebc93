"""The job as a rank runs it: real models, real data, the report on disk."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from safetensors.torch import save_file
from torch._dynamo.utils import counters
from training_runs import train

from benchmarks.recording_reporter import RecordingReporter
from service import models
from service.compilation import detectors, job
from service.compilation.host_fault import HostFaultError
from service.compilation.instruments.caches import clear_abandoned, empty_caches, owned_folder
from service.compilation.job import run
from service.compilation.program.target import batches
from service.compilation.rungs import RUNGS, Rung
from service.compilation.selftest import Proof, self_test
from service.compilation.selftest import run as selftest_run
from service.compilation.selftest.faults import FAULTS
from service.jobs.files import DataLayout
from service.jobs.runtime import RunContext
from service.jobs.spec.arithmetic import CompileChoice
from service.jobs.spec.compile import CompileSpec
from service.jobs.spec.model import MlpConfig, TransformerConfig
from service.models import mlp
from service.models.compiled import COMPILE_CACHE, cache_file
from service.models.parallelize import ModelRecipe, fingerprint
from service.training.gate import GateError, allowed_modes

JOB, TRAINED = "job_" + "1" * 20, "job_" + "2" * 20
MLP = {"family": "mlp", "in_features": 64, "hidden": [16], "out_features": 10}
TRANSFORMER = {"family": "transformer", "vocab_size": 256, "dim": 16, "layers": 1, "heads": 2, "max_sequence": 16}


class Reporter(RecordingReporter):
    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[int, int]] = []
        self.spans: list[str] = []
        self.lines: list[str] = []

    def progress(self, done: int, total: int, unit: str, **_: Any) -> None:
        self.done.append((done, total))

    def span(self, name: str, start: float, end: float, detail: Any = None) -> None:
        assert start <= end
        self.spans.append(name)

    def log(self, line: str) -> None:
        self.lines.append(line)


def context(data: DataLayout, stop: bool = False) -> tuple[RunContext, Reporter]:
    reporter = Reporter()
    return RunContext(JOB, 1, 0, 0, 1, "cpu", data, reporter, lambda: stop), reporter


@pytest.fixture
def _proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test holds: it has tests of its own, and takes its time."""
    monkeypatch.setattr(job, "self_test", lambda: (Proof("none", "nothing", False, ""),))


def spec(**fields: Any) -> CompileSpec:
    return CompileSpec.model_validate({"modes": ["eager", "aot_eager"], "shapes": [8], **fields})


def report(data: DataLayout) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((data.job(JOB).artifacts / "report.json").read_text())
    return found


@pytest.mark.slow
def test_the_digits_classifier_passes_the_whole_ladder(data: DataLayout) -> None:
    where, reporter = context(data)
    wanted = spec(model=MLP, data={"source": "digits"}, modes=["eager", "aot_eager", "inductor"], shapes=[16])
    result = run(wanted, where)
    assert result is not None
    written = report(data)
    assert [row["verdict"] for row in written["rungs"]] == ["pass"] * 6, written["rungs"]
    assert (result["gate"]["train"], result["gate"]["inference"]) == ("inductor", "inductor")
    own = fingerprint(MlpConfig(**MLP), ModelRecipe(), torch.device("cpu"))
    assert result["gate"]["fingerprint"] == own
    assert result["verdicts"] == {"pass": 6}
    assert result["summary"][0] == "Training may be compiled with inductor: all 3 rungs passed."
    assert written["toolchain_s"] > 0
    assert len(written["selftest"]) > 8
    assert all(proof["holds"] for proof in written["selftest"])
    for row in written["rungs"]:
        assert row["fullgraph"]
        assert row["step_ms"] > 0
        assert row["compile_s"]["cold"] >= 0
        assert row["parity"]["judged_by"] == "float64"
        (called,) = row["invocations"]
        assert (called["module"], called["phase"], called["shape"]) == ("model", row["phase"], "[16, 64]")
        assert called["calls"] == (8 if row["phase"] == "train" else 4)  # in training from one state, and free
        assert called["per_step"] == 1
    assert list(dict.fromkeys(reporter.done)) == [(done, 6) for done in range(7)]
    assert reporter.spans[-1] == "inference/inductor"
    assert reporter.series("train/inductor/passed") == [1.0]
    assert reporter.artifacts[-1] == data.job(JOB).artifacts / "report.json"
    assert_nothing_is_compiled_again(data)


def manifest(data: DataLayout) -> dict[str, str]:
    """SHA-256 of what the compile job published, by name."""
    home = data.job(JOB).artifacts
    files = [path for path in home.rglob("*") if path.is_file()]
    return {path.relative_to(home).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def assert_nothing_is_compiled_again(data: DataLayout) -> None:
    """In a training job that names the gate, and has no other cache than the one that was kept with it."""
    work = {"model": MLP, "data": {"source": "digits"}, "steps": 2, "batch": {"global": 16}}
    with empty_caches():
        counters.clear()
        trained = train(
            data.root,
            {**work, "compile": {"train": True, "gate": JOB}},
            job_id=TRAINED,
            test_samples=16,
            gate_artifacts=manifest(data),
        )
        assert f"rank 0: compiled code of {JOB} loaded" in trained["logs"]
        found = counters["inductor"]
        assert found["fxgraph_cache_hit"] == 2, found
        assert found["fxgraph_cache_miss"] == 0


@pytest.mark.slow
def test_a_second_job_on_the_host_takes_the_self_test_of_the_first_and_says_so(
    data: DataLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs = [(Proof("none", "nothing", False, ""),)]
    monkeypatch.setattr(job, "self_test", proofs.pop)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr("torch._inductor.codecache._HEADER_DIR", "")
    monkeypatch.setattr("torch._inductor.codecache._HEADER_LOCK_DIR", "")
    since = []
    for _ in range(2):
        run(spec(model=MLP, modes=["eager"], phases=["inference"], steps=2), context(data)[0])
        since.append(report(data)["selftest_kept_since"])
        assert report(data)["selftest"] == [
            {"detector": "none", "fault": "nothing", "fired": False, "message": "", "holds": True}
        ]
    assert since[0] == ""
    assert datetime.fromisoformat(since[1]) <= datetime.now(UTC)
    assert not proofs
    assert str(tmp_path / "kept" / "precompiled_headers") == torch._inductor.codecache._HEADER_DIR


@pytest.mark.usefixtures("_proven")
def test_a_training_job_reads_the_gate_that_was_written(data: DataLayout) -> None:
    where, _ = context(data)
    run(spec(model=TRANSFORMER, data={"source": "tokens", "sequence": 16}, phases=["train"]), where)
    own = fingerprint(TransformerConfig(**TRANSFORMER), ModelRecipe(), torch.device("cpu"))
    choice = CompileChoice(train=True, gate=JOB)
    assert allowed_modes(choice, [own], data) == {"train": "aot_eager"}


@pytest.mark.usefixtures("_proven")
def test_the_model_of_a_training_job_is_checked_with_its_weights(data: DataLayout) -> None:
    config = MlpConfig(**MLP)
    folder = data.job(TRAINED).artifacts
    folder.mkdir(parents=True)
    weights = {name: value.detach() * 0 for name, value in models.build(config, seed=1).named_parameters()}
    save_file(weights, folder / "model.safetensors")
    (folder / "model.json").write_text(
        json.dumps({"config": config.model_dump(mode="json"), "step": 1, "parallel": {}})
    )
    where, _ = context(data)
    run(spec(model={"job": TRAINED}, phases=["inference"], modes=["eager"]), where)
    written = report(data)
    assert written["model"]["hidden"] == [16]
    assert written["rungs"][0]["verdict"] == "pass"


def test_a_job_that_is_asked_to_stop_reaches_no_further_rung(data: DataLayout) -> None:
    where, _ = context(data, stop=True)
    result = run(spec(model=MLP), where)
    assert result is not None
    assert result["verdicts"] == {"not_reached": 4}
    assert result["completed"] == {"done": 0, "total": 4, "unit": "rungs"}
    assert result["gate"]["train"] is None
    assert report(data)["rungs"][0]["findings"][0]["message"] == "the job was asked to stop"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": MLP, "parallel": {"pp": 1, "tp": 2}}, "2 ranks were asked for, but 1 were started"),
        ({"model": MLP, "micro_batches": 4, "parallel": {"pp": 2}}, "expected pipeline.micro_batches instead"),
        ({"model": {**MLP, "in_features": 65}, "data": {"source": "digits"}}, "the data has 64 features"),
        ({"model": {**MLP, "out_features": 9}, "data": {"source": "digits"}}, "the data has 10 classes"),
        ({"model": MLP, "data": {"source": "tokens"}}, "family mlp reads features"),
        ({"model": TRANSFORMER, "data": {"source": "digits"}}, "family transformer reads tokens"),
        ({"model": TRANSFORMER, "data": {"source": "tokens", "sequence": 32}}, "longer than model.max_sequence=16"),
        ({"model": {**TRANSFORMER, "vocab_size": 100}, "data": {"source": "tokens", "sequence": 8}}, "tokens up to"),
        ({"model": {"job": TRAINED}}, "has no weights of step 'latest'"),
    ],
)
def test_what_cannot_be_checked_is_refused_before_anything_is_written(
    data: DataLayout, fields: dict[str, Any], message: str
) -> None:
    where, reporter = context(data)
    with pytest.raises(ValueError, match=message):
        run(spec(**fields), where)
    assert not data.job(JOB).root.exists()
    assert not reporter.done


def test_batches_take_the_shapes_in_turn_and_each_rank_its_own_samples() -> None:
    wanted = spec(model=MLP, data={"source": "digits"}, shapes=[3, 5], steps=3)
    config, device = MlpConfig(**MLP), torch.device("cpu")
    first, second = batches(wanted, config, device), batches(wanted, config, device, part=1)
    assert [len(batch.targets) for batch in first] == [3, 5, 3, 5]
    assert not torch.equal(first[0].inputs[0], second[0].inputs[0])


def test_random_tokens_are_followed_by_their_targets() -> None:
    (batch, *_) = batches(spec(model=TRANSFORMER), TransformerConfig(**TRANSFORMER), torch.device("cpu"))
    assert batch.inputs[0].shape == batch.targets.shape == (8, 16)
    assert torch.equal(batch.inputs[0][:, 1:], batch.targets[:, :-1])


@pytest.mark.usefixtures("_proven")
def test_a_machine_without_a_compiler_gives_no_verdict_and_no_gate(data: DataLayout) -> None:
    where, _ = context(data)
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(HostFaultError, match=r"on this host: InvalidCxxCompiler: No working C\+\+ compiler"),
    ):
        run(spec(model=MLP, modes=["eager", "aot_eager", "inductor"], phases=["inference"]), where)
    assert not (where.paths.artifacts / "report.json").exists()


def test_the_gate_is_closed_by_a_detector_that_does_not_see_its_fault(
    data: DataLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    blind = tuple(each for each in detectors.DETECTORS if each is not detectors.vacuous.detect)
    monkeypatch.setattr(detectors, "DETECTORS", blind)
    monkeypatch.setattr(selftest_run, "FAULTS", [each for each in FAULTS if each.detector in ("vacuous", "frozen")])
    fresh: Any = self_test.__wrapped__  # its proofs are kept for the life of a process
    monkeypatch.setattr(job, "self_test", fresh)
    where, _ = context(data)
    result = run(spec(model=MLP, phases=["inference"]), where)
    assert result is not None
    assert result["verdicts"] == {"pass": 2}
    assert result["gate"]["inference"] is None
    assert result["gate"]["closed"].startswith("the self-test failed: detector vacuous did not find ")
    assert result["summary"][:2] == [
        f"Nothing may be compiled: {result['gate']['closed']}.",
        "Inference: all 2 rungs passed.",
    ]
    own = fingerprint(MlpConfig(**MLP), ModelRecipe(), torch.device("cpu"))
    with pytest.raises(GateError, match=r"allows nothing for this phase \(the self-test failed: "):
        allowed_modes(CompileChoice(inference=True, gate=JOB), [own], data)


def test_what_was_kept_damaged_is_compiled_again(data: DataLayout) -> None:
    folder = data.job(JOB).artifacts
    (folder / COMPILE_CACHE).mkdir(parents=True)
    (folder / COMPILE_CACHE / cache_file("train", "aot_eager", 0)).write_bytes(b"half of a cache")
    own = fingerprint(MlpConfig(**MLP), ModelRecipe(), torch.device("cpu"))
    opened = {"train": "aot_eager", "inference": None, "fingerprint": own, "shapes": [[16, 64]]}
    (folder / "report.json").write_text(json.dumps({"gate": opened}))
    work = {"model": MLP, "data": {"source": "digits"}, "steps": 2, "batch": {"global": 16}}
    chosen = {**work, "compile": {"train": True, "gate": JOB}}
    trained = train(data.root, chosen, job_id=TRAINED, test_samples=16, gate_artifacts=manifest(data))
    assert len(trained["loss"]) == 2
    assert f"rank 0: compiled code of {JOB} not usable: it is damaged, and compiled again" in trained["logs"]
    (folder / COMPILE_CACHE / cache_file("train", "aot_eager", 0)).unlink()
    trained = train(data.root, chosen, job_id=TRAINED, test_samples=16)
    told = f"rank 0: compiled code of {JOB} not usable: none was kept for this rank in aot_eager"
    assert any(line.startswith(told) for line in trained["logs"])


def test_folders_of_processes_that_were_killed_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reading, writing = os.pipe()
    other = os.fork()
    if not other:
        with owned_folder() as folder:
            os.write(writing, f"{folder}\n".encode())
            signal.pause()
    with open(reading) as told:  # noqa: PTH123  # a pipe
        left = Path(told.readline().strip())
    with empty_caches() as own:
        clear_abandoned()
        assert left.exists()
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        clear_abandoned()
        assert own.exists()
        assert not left.exists()
    assert list(tmp_path.iterdir()) == []
    os.close(writing)


def test_no_draft_is_left_beside_the_report(data: DataLayout) -> None:
    where, _ = context(data, stop=True)
    run(spec(model=MLP), where)
    folder: Path = data.job(JOB).artifacts
    assert [path.name for path in folder.iterdir()] == ["report.json"]


@pytest.mark.slow
def test_a_failed_rung_leaves_a_script_that_fails_alike_alone(
    data: DataLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = "relu_compile_error_TESTING_ONLY"  # of PyTorch's own tests: fails where a graph has ``torch.relu``
    monkeypatch.setitem(mlp.ACTIVATIONS, "relu", torch.relu)  # type: ignore[misc]
    ladder = (RUNGS["eager"], Rung("aot_eager", backend, compiles_backward=False))
    monkeypatch.setattr(job, "climb_to", lambda modes: ladder)
    monkeypatch.setattr(job, "self_test", tuple)
    where, reporter = context(data)
    result = run(spec(model=MLP, phases=["inference"]), where)
    assert result is not None
    assert result["verdicts"] == {"pass": 1, "fail_error": 1}
    assert re.fullmatch(r".+: inference, 2 rungs up to aot_eager, .+ = 1 rank on cpu", reporter.lines[0])
    assert reporter.lines[1].startswith("self-test")
    assert re.fullmatch(r"inference/eager: pass after \d+ s", reporter.lines[2])
    assert re.fullmatch(r"inference/aot_eager: fail error after \d+ s", reporter.lines[3])
    told = len(reporter.lines) - len(report(data)["summary"])
    assert reporter.lines[told - 1].startswith("inference/aot_eager: looking for the failing module")
    assert reporter.lines[told:] == report(data)["summary"]
    written, artifacts = report(data), data.job(JOB).artifacts
    (found,) = written["diagnoses"]
    script, trace = artifacts / found["reproduction"]["script"], artifacts / found["trace"]
    assert {script, script.with_suffix(".safetensors"), trace} <= set(reporter.artifacts)
    assert any(each.stat().st_size for each in trace.iterdir())
    # Elsewhere, as a person would who was sent the two files: this repository is not on its path.
    elsewhere = data.root / "elsewhere"
    elsewhere.mkdir()
    for each in (script, script.with_suffix(".safetensors")):
        (elsewhere / each.name).write_bytes(each.read_bytes())
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    alone = subprocess.run(
        [sys.executable, script.name],
        check=False,
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert alone.returncode == 1, alone.stderr
    assert "ReluCompileError" in alone.stdout
    assert alone.stdout.strip().splitlines()[-1] == found["reproduction"]["said"].strip()
    assert found["reproduction"]["confirmed"]
    assert found["module"].startswith("model")
