"""The training job in one process: it learns, reports, publishes, and refuses what it must."""

from __future__ import annotations

import dataclasses
import json
import resource
import time
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from lanes import first_fast
from launching import Torchrun
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from training_runs import JOB, MLP, TRANSFORMER, Recording, train

from service.jobs.files import DataLayout
from service.jobs.spec.data import DigitsData
from service.jobs.spec.model import MlpConfig
from service.models import build, data, parallelize
from service.models.compiled import apply_compile
from service.models.data import BatchOrder, Dataset, Split
from service.models.parallelize import ModelRecipe, fingerprint
from service.parallel import checkpoint
from service.parallel.boundary import StepBoundary
from service.training.gate import GateError
from service.training.gradients import NonFiniteError
from service.training.journal import readable_bytes
from service.training.loop import Loop

GATE = "job_" + "g" * 20
CPU = torch.device("cpu")
MLP_DATA = DigitsData()


def test_digits_are_learned(tmp_path: Path) -> None:
    spec = {**MLP, "steps": 300, "batch": {"global": 64}, "model": {**MLP["model"], "hidden": [128, 64]}}
    result = train(tmp_path, spec)["result"]
    assert result["eval_accuracy"] >= 0.9
    assert result["loss"] < 0.1


@pytest.mark.slow
def test_text_becomes_less_surprising(tmp_path: Path) -> None:
    run = train(tmp_path, {**TRANSFORMER, "steps": 60, "batch": {"global": 16}, "optimizer": {"lr": 1e-2}})
    assert run["loss"][0] == pytest.approx(5.545, abs=0.1)  # ln 256: knows nothing yet
    assert run["result"]["eval_loss"] < 3.4
    assert run["result"]["eval_perplexity"] < 30


def test_everything_is_reported_and_published(tmp_path: Path) -> None:
    report = Recording()
    spec = {**MLP, "steps": 4, "checkpoint": {"every": 1, "keep": 2}, "schedule": {"warmup": 2}}
    result = train(tmp_path, spec, report=report)["result"]
    artifacts = DataLayout(tmp_path).job(JOB).artifacts
    first = next(values for _, values in report.metrics if "loss" in values)
    measured = {"step_ms", "data_wait_fraction", "samples_per_s", "tflops", "memory_gib"}
    assert {name for name in first if not name.startswith("device_")} == {"loss", "grad_norm", "lr"} | measured
    assert first["memory_gib"] * 2**20 <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert first["memory_gib"] > 0.05, "torch alone has more"
    assert [values["lr"] for _, values in report.metrics if "lr" in values] == pytest.approx([5e-3, 1e-2, 1e-2, 1e-3])
    assert report.done == (4, 4, "steps")
    assert set(report.spans) == {"data", "forward_backward", "optimizer", "checkpoint", "evaluate"}
    assert {path.name for path in report.artifacts} == {
        "metrics.parquet",
        "model.safetensors",
        "model.json",
        "step_3",
        "step_4",
    }
    assert all(path.exists() for path in report.artifacts)
    assert result["parameters"] == 64 * 32 + 32 + 32 * 32 + 32 + 32 * 10 + 10
    about = json.loads((artifacts / "model.json").read_bytes())
    assert (about["step"], about["config"]["family"], about["parallel"]["tp"]) == (4, "mlp", 1)
    assert about["data_sha256"] == result["data_sha256"]
    assert pq.read_table(artifacts / "metrics.parquet")["loss"].to_pylist() == list(report.series("loss"))


def test_the_log_says_what_was_done(tmp_path: Path) -> None:
    report = Recording()
    spec = {**MLP, "steps": 4, "checkpoint": {"every": 2, "keep": 1}, "evaluate": {"every": 3}}
    result = train(tmp_path, spec, report=report)["result"]
    said = dict(line.split(": ", 1) for line in report.logs)
    assert said["data"].startswith("digits, 1,438 samples to train on, 359 to test (SHA-256 ")
    assert result["data_sha256"][:12] in said["data"]
    assert said["model"] == f"mlp, {result['parameters']:,} parameters, computed in fp32"
    assert said["layout"] == "pp=1 × dp_replicate=1 × dp_shard=1 × tp=1 = 1 rank on CPU"
    assert said["training"] == "4 steps of 24 samples"
    kept = DataLayout(tmp_path).job(JOB).checkpoints / "step_4"
    size = sum(path.stat().st_size for path in kept.glob("*.safetensors"))
    assert said["checkpoint of step 4"] == readable_bytes(size)
    assert "checkpoint of step 2" in said
    assert f"eval_accuracy {result['eval_accuracy']:.4g}" in said["evaluation at step 4"]
    assert "evaluation at step 3" in said
    assert said["finished after step 4 of 4"].startswith(f"loss {result['loss']:.4g}, ")
    sizes = (999, 1000, 9_960, 324_000, 999_700, 1_534_000)
    assert [readable_bytes(size) for size in sizes] == ["999 bytes", "1.0 kB", "10 kB", "324 kB", "1.0 MB", "1.5 MB"]


def test_the_log_says_that_a_training_was_stopped_and_went_on(tmp_path: Path) -> None:
    report = Recording()
    train(tmp_path, {**MLP, "steps": 4}, report=report, stop_after=2)
    assert report.logs[-1].startswith("asked to stop after step 2 of 4: ")
    train(tmp_path, {**MLP, "steps": 4}, report=report)
    assert "training: 4 steps of 24 samples, from step 2 on" in report.logs


def test_the_published_weights_give_the_reported_accuracy(tmp_path: Path) -> None:
    result = train(tmp_path, {**MLP, "steps": 30})["result"]
    model = build(MlpConfig.model_validate(MLP["model"]))
    model.load_state_dict(load_file(DataLayout(tmp_path).job(JOB).artifacts / "model.safetensors"))
    test = data.load(MLP_DATA).test
    accuracy = (model(test.inputs).argmax(1) == test.targets).double().mean().item()
    assert result["eval_accuracy"] == pytest.approx(accuracy, abs=1e-12)


def test_durations_stay_right_when_the_clock_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, looks = time.time, count()
    monkeypatch.setattr(time, "time", lambda: real() - 3600.0 * next(looks))
    report = Recording()  # which wants spans to end after their beginning
    assert train(tmp_path, {**MLP, "steps": 2}, report=report, test_samples=8)["result"]["seconds"] > 0
    assert report.spans.count("data") == 2
    for name in ("step_ms", "samples_per_s", "data_wait_fraction"):
        assert all(value > 0 for value in report.series(name)), name


def test_a_device_without_memory_says_what_needs_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(_: Loop) -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Loop, "train", run_out)
    with pytest.raises(torch.OutOfMemoryError, match=r"2\.00 GiB; less is needed with activation_checkpoint: full"):
        train(tmp_path, {**MLP, "steps": 1})


@pytest.mark.slow
def test_tokens_per_second_are_reported_for_text(tmp_path: Path) -> None:
    report = Recording()
    train(tmp_path, {**TRANSFORMER, "steps": 1}, report=report)
    values = next(values for _, values in report.metrics if "step_ms" in values)
    assert values["tokens_per_s"] == pytest.approx(8 * 32 / (values["step_ms"] / 1e3))
    # 6·(N − N_emb) + 12·L·H·d_head·seq per token: q and output 2·32², k and v 2·32·16, SwiGLU 3·32·128, norms, head.
    matrices = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 128 + 2 * 32) + 32 + 32 * 256
    flop_per_token = 6 * matrices + 12 * 2 * 32 * 32
    assert values["tflops"] == pytest.approx(flop_per_token * values["tokens_per_s"] / 1e12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": {"global": 10, "micro": 3}}, "each of 1 data-parallel ranks 10 samples, .* into 3 micro-batches"),
        ({"batch": {"global": 9}, "parallel": {"dp_shard": 2}}, r"batch.global=9 does not divide over .* 2 ranks"),
        ({"parallel": {"tp": 2}}, r"tp=2 = 2 ranks were asked for, but 1 were started"),
        ({"precision": {"param": "bf16"}}, "needs a launched group"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train(tmp_path, {**MLP, "steps": 1, **change})
    assert not DataLayout(tmp_path).job(JOB).root.exists()


def poisoned(rank: int, ranks: int, step: int, loaded: Dataset) -> Dataset:
    """A sample that ``rank`` of ``ranks`` meets first at ``step`` (from 1) holds a NaN."""
    order = BatchOrder(0, len(loaded.train), MLP["batch"]["global"])
    inputs = loaded.train.inputs.clone()
    inputs[order.share(step - 1, rank, ranks)[0]] = float("nan")
    return dataclasses.replace(loaded, train=Split(inputs, loaded.train.targets))


def train_on_poison(folder: str) -> str:
    """On two ranks: the error that each of them ends with."""
    loaded = poisoned(1, 2, 3, data.load(MLP_DATA))
    data.load = lambda spec, layout: loaded
    try:
        train(folder, {**MLP, "steps": 5, "parallel": {"dp_shard": 2}, "checkpoint": {"every": 1}})
    except NonFiniteError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
@pytest.mark.distributed
def test_a_loss_that_is_no_number_ends_all_ranks_and_names_the_culprit(tmp_path: Path, torchrun: Torchrun) -> None:
    errors = torchrun(train_on_poison, 2, folder=str(tmp_path))
    assert all(error.startswith("the loss is not finite on rank 1 at step 3") for error in errors), errors
    newest = checkpoint.complete(DataLayout(tmp_path).job(JOB).checkpoints)[-1]
    assert newest.step == 2
    assert all(tensor.isfinite().all() for tensor in checkpoint.load_whole(newest.path).values())


def train_in_half_precision(folder: str) -> list[float]:
    return train(folder, {**MLP, "steps": 5, "parallel": {"dp_shard": 2}, "precision": {"param": "bf16"}})["loss"]


@pytest.mark.slow
@pytest.mark.distributed
def test_bf16_follows_float32_to_its_precision(tmp_path: Path, torchrun: Torchrun) -> None:
    half = torchrun(train_in_half_precision, 2, folder=str(tmp_path / "half"))[0]
    full = train(tmp_path / "full", {**MLP, "steps": 5})["loss"]
    assert half == pytest.approx(full, rel=2e-2)  # bf16 has 8 bits: 2^-8 = 4e-3 a rounding
    assert half != pytest.approx(full, rel=1e-6)


def open_gate(folder: Path, train_rung: str | None, inference_rung: str | None, **other: object) -> None:
    own = fingerprint(MlpConfig.model_validate(MLP["model"]), ModelRecipe(), CPU)
    gate = {"train": train_rung, "inference": inference_rung, "fingerprint": {**own, **other}}
    report = {"gate": {**gate, "shapes": [[MLP["batch"]["global"], MLP["model"]["in_features"]]]}}
    artifacts = DataLayout(folder).job(GATE).artifacts
    artifacts.mkdir(parents=True)
    (artifacts / "report.json").write_text(json.dumps(report))


def compiled(**phases: bool) -> dict[str, Any]:
    return {**MLP, "steps": 3, "compile": {**phases, "gate": GATE}}


@pytest.mark.parametrize(
    "phases", first_fast(1, [{"train": True}, {"inference": True}, {"train": True, "inference": True}])
)
def test_an_open_gate_compiles_what_was_asked_for(tmp_path: Path, phases: dict[str, bool]) -> None:
    open_gate(tmp_path, "aot_eager", "aot_eager")
    eager = train(tmp_path / "eager", {**MLP, "steps": 3})
    torch._dynamo.reset()
    counters.clear()
    run = train(tmp_path, compiled(**phases))
    assert run["loss"] == pytest.approx(eager["loss"], rel=1e-6)
    assert run["eval_loss"] == pytest.approx(eager["eval_loss"], rel=1e-6)
    # One graph for each phase: they differ in whether gradients are recorded, and in the batch's last dimension not.
    assert counters["stats"]["unique_graphs"] == len(phases)


def test_compiled_modules_are_called_across_the_boundary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_gate(tmp_path, "aot_eager", "aot_eager")
    across, calls = [False], []

    def boundary_call(boundary: StepBoundary, module: Any, *arguments: Any) -> Any:
        across.append(True)
        try:
            return original(boundary, module, *arguments)
        finally:
            across.pop()

    def compile_and_watch(*arguments: Any, **named: Any) -> Any:
        units = apply_compile(*arguments, **named)
        for unit in units:
            compiled_call = unit._compiled_call_impl
            unit._compiled_call_impl = lambda *given, run=compiled_call: (calls.append(across[-1]), run(*given))[1]
        return units

    original = StepBoundary.boundary_call
    monkeypatch.setattr(StepBoundary, "boundary_call", boundary_call)
    monkeypatch.setattr(parallelize, "apply_compile", compile_and_watch)
    train(tmp_path, compiled(train=True, inference=True))
    assert len(calls) > 3
    assert all(calls)


def test_no_compilation_unless_asked_for(tmp_path: Path) -> None:
    torch._dynamo.reset()
    counters.clear()
    train(tmp_path, {**MLP, "steps": 2})
    assert counters["stats"]["unique_graphs"] == 0


@pytest.mark.parametrize(
    ("rungs", "other", "change", "message"),
    [
        ((None, "aot_eager"), {}, {}, "compile.train: the gate of job_g+ allows nothing"),
        (("eager", "eager"), {}, {}, "compile.train: the gate of job_g+ allows eager"),
        (("inductor", None), {"torch": "1.0"}, {}, r"torch is '.*' here and '1.0' in the report"),
        (
            ("inductor", None),
            {"model.hidden": "[8]"},
            {},
            r"model.hidden is '\[32, 32\]' here and '\[8\]' in the report",
        ),
        (
            ("inductor", None),
            {},
            {"activation_checkpoint": "full"},
            "activation_checkpoint is 'full' here and 'none'",
        ),
    ],
)
def test_a_closed_gate_is_refused_by_field(
    tmp_path: Path, rungs: tuple[str | None, str | None], other: dict[str, str], change: dict[str, str], message: str
) -> None:
    open_gate(tmp_path, *rungs, **other)
    with pytest.raises(GateError, match=message):
        train(tmp_path, {**compiled(train=True), **change})
    assert not DataLayout(tmp_path).job(JOB).root.exists()


def test_a_gate_that_published_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GateError, match=r"has published no report\.json"):
        train(tmp_path, compiled(inference=True))
