"""Architectures that packages have by name, trained as plain torch trains them; ``benchmarks/families.py`` has more."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from launching import Torchrun
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from training_runs import JOB, train

from service.compilation import job as compile_job
from service.formats.weights import PACKAGED
from service.jobs.files import DataLayout
from service.jobs.runtime import NullReporter, RunContext
from service.jobs.spec.compile import CompileSpec
from service.jobs.spec.train import TrainSpec
from service.jobs.spec.verify import VerifySpec
from service.models import build
from service.models.data import BatchOrder, Split, load
from service.models.randomness import seed_all
from service.verification import job as verify_job

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("timm", "torchvision", "transformers")),
    reason="the extra `families` is not installed",
)
OTHER = "job_" + "u" * 20
GREY = {"channels": 1, "height": 8, "width": 8, "classes": 10}
RESNET = {
    "model_type": "resnet",
    "num_channels": 1,
    "num_labels": 10,
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),  # which draw differently on each rank
}
DIGITS, TEXT = {"source": "digits"}, {"source": "tokens", "sequence": 16}
COLOURS = {"source": "synthetic", "features": 3 * 32 * 32, "classes": 10, "samples": 64}
PICTURES = {"family": "huggingface", "config": RESNET, "task": "image-classification", "image": [1, 8, 8]}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "timm": ({"family": "timm", "name": "lcnet_035", **GREY}, DIGITS),
    "drawing": ({"family": "timm", "name": "lcnet_035", **GREY, "options": {"drop_rate": 0.5}}, DIGITS),
    "torchvision": (
        {"family": "torchvision", "name": "squeezenet1_1", "height": 32, "width": 32, "classes": 10},
        COLOURS,
    ),
    "language": ({"family": "huggingface", "config": GPT2, "sequence": 16}, TEXT),
    "pictures": (PICTURES, DIGITS),
}


def spec_of(name: str, **changes: Any) -> dict[str, Any]:
    model, data = MODELS[name]
    common = {"batch": {"global": 8}, "optimizer": {"clip_norm": None}, "schedule": {"decay": "constant"}, "steps": 2}
    return {"model": model, "data": data, **common, "evaluate": {"samples": 8}, **changes}


def run(folder: str | Path, name: str, *, job_id: str = JOB, **changes: Any) -> Any:
    return train(f"{folder}/{name}", spec_of(name, **changes), job_id=job_id, state=torch.float64)


def weights(folder: str | Path, name: str, job_id: str = JOB) -> dict[str, Tensor]:
    return load_file(DataLayout(Path(f"{folder}/{name}")).job(job_id).artifacts / "model.safetensors")


def by_plain_torch(name: str) -> tuple[list[float], dict[str, Tensor]]:
    spec = TrainSpec.model_validate(spec_of(name))
    model = build(cast(Any, spec.model), dtype=torch.float64)
    samples, losses = cast(Split, load(spec.data).train), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(2):
        batch = samples.take(BatchOrder(0, len(samples), 8).indices(step))
        seed_all(0, "step", step, 0, 0)
        inputs = batch.inputs.double() if batch.inputs.is_floating_point() else batch.inputs
        loss = functional.cross_entropy(model(inputs).flatten(0, -2), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("name", MODELS)
def test_it_learns_and_resumes_as_in_plain_torch(tmp_path: Path, name: str) -> None:
    found = run(tmp_path, name, checkpoint={"every": 1, "keep": 9})
    losses, state = by_plain_torch(name)
    assert found["loss"] == pytest.approx(losses, rel=1e-12)
    own = weights(tmp_path, name)
    for each, value in own.items():
        torch.testing.assert_close(value, state[PACKAGED + each], rtol=1e-6, atol=1e-8)
    run(tmp_path, name, job_id=OTHER, resume={"job": JOB, "step": 1})
    again = weights(tmp_path, name, OTHER)
    assert all(torch.equal(own[each], again[each]) for each in own)


def run_sharded(folder: str) -> dict[str, Any]:
    """Two trainings under FSDP, and one whose gathered parameters are of half precision."""
    shards = {"parallel": {"dp_shard": 2}}
    found = {name: run(folder, name, **shards) for name in ("timm", "language")}
    half = train(f"{folder}/half", spec_of("timm", **shards, precision={"param": "bf16"}))
    return found | {"half": half}


@pytest.mark.slow
@pytest.mark.distributed
def test_it_learns_the_same_under_fsdp(tmp_path: Path, torchrun: Torchrun) -> None:
    found = torchrun(run_sharded, 2, folder=str(tmp_path))[0]
    for name in ("timm", "language"):
        losses, state = by_plain_torch(name)
        assert found[name]["loss"] == pytest.approx(losses, rel=1e-9)
        for each, value in weights(tmp_path, name).items():
            torch.testing.assert_close(value, state[PACKAGED + each], rtol=1e-5, atol=1e-7)
    assert found["half"]["loss"] == pytest.approx(found["timm"]["loss"], rel=0.05)


def context(folder: Path) -> RunContext:
    return RunContext(JOB, 1, 0, 0, 1, "cpu", DataLayout(folder), NullReporter(), bool)


def test_it_is_verified_by_its_running_statistics(tmp_path: Path) -> None:
    robust = {"robustness": {"data": DIGITS, "count": 2, "eps": 1e-6}}
    spec = VerifySpec.model_validate({"kind": "verify", "model": PICTURES, "property": robust, "method": "crown"})
    result = verify_job.run(spec, context(tmp_path))
    assert result is not None
    assert result["certified_accuracy"] == result["clean_accuracy"]
    assert result["mean_width"] < 1e-4


@pytest.mark.slow
def test_it_is_compile_checked(tmp_path: Path) -> None:
    fields = {
        "model": MODELS["language"][0],
        "shapes": [2],
        "steps": 2,
        "modes": ["eager", "aot_eager"],
        "phases": ["train"],
    }
    result = compile_job.run(CompileSpec.model_validate({"kind": "compile", **fields}), context(tmp_path))
    assert result is not None
    assert result["gate"]["train"] == "aot_eager"
    assert result["gate"]["fingerprint"]["model.package"].startswith("transformers ")
