"""Models of transformers that tensor-parallel ranks divide by their own plan compute what one process does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from launching import Torchrun
from pydantic import TypeAdapter
from safetensors.torch import load_file
from training_runs import JOB, train

from service.jobs.files import DataLayout
from service.jobs.plugins import ModelConfig
from service.jobs.spec.common import ParallelSpec
from service.jobs.spec.model import ModelRef
from service.models import build
from service.parallel import mesh as meshes
from service.parallel.tensor.placement import places_of

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="the extra `families` is not installed")
OTHER = "job_" + "u" * 20
SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
# Norms of heads, a table that two layers share, and an id whose row gets no gradient as an input, on the second rank.
QWEN3 = {"model_type": "qwen3", **SIZE, "num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": True}
QWEN3 |= {"vocab_size": 256, "pad_token_id": 200, "bos_token_id": 1, "eos_token_id": 2}
SPEC: dict[str, Any] = {
    "model": {"family": "huggingface", "config": QWEN3, "sequence": 16},
    "data": {"source": "tokens", "sequence": 16},
    "batch": {"global": 8, "micro": 2},
    "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "clip_norm": 0.5},
    "steps": 2,
    "checkpoint": {"every": 1, "keep": 9},
}
TWO, FOUR = {"tp": 2}, {"tp": 2, "dp_shard": 2}


def run(folder: str | Path, job_id: str = JOB, **changes: Any) -> dict[str, Any]:
    return train(folder, {**SPEC, **changes}, job_id=job_id, test_samples=4, state=torch.float64)


def begin_and_go_on(folder: str, parallel: dict[str, int]) -> list[dict[str, Any]]:
    """On each rank: a training, and the second step of what one process has begun."""
    own = run(f"{folder}/divided", parallel=parallel)
    return [own, run(f"{folder}/alone", OTHER, parallel=parallel, resume={"job": JOB, "step": 1})]


def weights(folder: Path, job_id: str = JOB) -> dict[str, torch.Tensor]:
    return load_file(DataLayout(folder).job(job_id).artifacts / "model.safetensors")


@pytest.mark.distributed
@pytest.mark.parametrize("parallel", [TWO, pytest.param(FOUR, marks=pytest.mark.slow)], ids=["tp", "tp fsdp"])
def test_every_layout_trains_and_resumes_the_same_model(
    tmp_path: Path, torchrun: Torchrun, parallel: dict[str, int]
) -> None:
    one = run(tmp_path / "alone")
    ranks = parallel["tp"] * parallel.get("dp_shard", 1)
    divided, resumed = torchrun(begin_and_go_on, ranks, folder=str(tmp_path), parallel=parallel)[0]
    run(tmp_path / "divided", OTHER, resume={"job": JOB, "step": 1})
    for metric in ("loss", "grad_norm", "eval_loss"):
        assert divided[metric] == pytest.approx(one[metric], rel=1e-10)
        assert resumed[metric] == pytest.approx(one[metric][-len(resumed[metric]) :], rel=1e-10)
    expected = weights(tmp_path / "alone")
    for folder, job_id in (("divided", JOB), ("divided", OTHER), ("alone", OTHER)):
        for name, value in weights(tmp_path / folder, job_id).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-10)


def planned(**changes: Any) -> torch.nn.Module:
    return build(reference(**changes), meshes.plan(ParallelSpec(tp=2), 0), device="meta")


def reference(**changes: Any) -> ModelConfig:
    config = {name: value for name, value in {**QWEN3, **changes}.items() if value is not None}
    adapter: TypeAdapter[Any] = TypeAdapter(ModelRef)
    return cast(ModelConfig, adapter.validate_python({**SPEC["model"], "config": config}))


def test_each_rank_has_its_part() -> None:
    whole = {"model.norm.weight", *(f"model.layers.0.{name}_layernorm.weight" for name in ("input", "post_attention"))}
    whole |= {f"model.layers.0.self_attn.{name}_norm.weight" for name in "qk"}
    found = {each.name.removeprefix("blocks.0.network.") for each in places_of(planned()) if each.dimension is None}
    assert found == whole


BARE = {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2, "head_dim": None, "pad_token_id": None}
MIXTRAL = {**BARE, "model_type": "mixtral", "num_local_experts": 2, "tie_word_embeddings": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "stablelm", **BARE}, "parallel.tp: stablelm has no tensor-parallel plan; expected 1"),
        (MIXTRAL, r"the plan of mixtral has '.*experts.gate_up_proj' as 'packed_colwise', which has no rule here"),
        ({"num_key_value_heads": 1}, r"model.config.num_key_value_heads: 1 does not divide by tp=2; expected a"),
        ({"vocab_size": 255}, r"qwen3: model.embed_tokens \(embedding_rowwise\): num_embeddings=255 does not divide"),
        ({"attention_dropout": 0.1}, "model.config.attention_dropout: 0.1 draws apart on each tensor-parallel rank"),
        (
            {"model_type": "phi", **BARE, "qk_layernorm": True},
            "'model.layers.0.self_attn.q_layernorm.weight' lies among divided layers, and the plan has no kind for it",
        ),
    ],
)
def test_what_a_plan_does_not_divide_is_named_by_the_rank(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned(**changes)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"num_key_value_heads": 1}, [("model.config.num_key_value_heads", 1, "a multiple of 2")]),
        ({"model_type": "phi3", "num_key_value_heads": 1}, []),  # whose ranks have all heads
        ({"vocab_size": 255}, [("model.config.vocab_size", 255, "a multiple of 2")]),
        ({"attention_dropout": 0.1}, [("model.config.attention_dropout", 0.1, "0")]),
    ],
)
def test_what_does_not_divide_is_refused_at_submit(changes: dict[str, Any], found: list[tuple[Any, ...]]) -> None:
    problems = reference(**changes).check_parallel(ParallelSpec(tp=2), 1)
    assert [(path, got, expected) for path, _, got, expected in problems] == found


def test_an_architecture_without_a_plan_is_refused_at_submit() -> None:
    ((path, message, got, expected),) = reference(model_type="gpt2").check_parallel(ParallelSpec(tp=2), 1)
    assert (path, got) == ("parallel.tp", 2)
    assert "gpt2" in message
    assert expected.startswith("1, or config.model_type arcee, ")
    assert reference(model_type="gpt2").check_parallel(ParallelSpec(), 1) == []
