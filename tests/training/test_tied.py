"""One table for embedding and head: trained as one process trains it on every layout, kept and exported once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Torchrun
from layout_groups import of_ranks
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from training_runs import JOB, TRANSFORMER, train

from service.jobs.files import DataLayout
from service.jobs.spec.model import TransformerConfig
from service.models import build

TIED: dict[str, Any] = {
    **TRANSFORMER,
    # Heads that are not dim/heads wide, and biases, are divided beside it.
    "model": {**TRANSFORMER["model"], "layers": 4, "tied_embeddings": True, "head_dim": 6, "qkv_bias": True},
    "steps": 3,
    "checkpoint": {"every": 2},
    "export": {"huggingface": "fp32"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp_shard2": {"parallel": {"dp_shard": 2}},
    "tp2": {"parallel": {"tp": 2}},
    "pp2": {"parallel": {"pp": 2}},
    "pp2 interleaved": {"parallel": {"pp": 2}, "pipeline": {"schedule": "interleaved"}},
    "pp2 zbv, both stages on one rank": {"parallel": {"pp": 2}, "pipeline": {"schedule": "zbv"}},
    "pp4, a stage of two in between": {"parallel": {"pp": 4}, "batch": {"global": 8, "micro": 2}},
    "tp2, odd heads": {"parallel": {"tp": 2}, "model": "odd"},
    "pp2 tp2 zero_bubble, odd heads": {
        "parallel": {"pp": 2, "tp": 2},
        "model": "odd",
        "pipeline": {"schedule": "zero_bubble"},
    },
    "pp2 dp_shard2": {"parallel": {"pp": 2, "dp_shard": 2}, "batch": {"global": 8, "micro": 1}},
}
TOLERANCE = 1e-10  # float64 throughout: layouts differ by the order of sums only


FAST = ["pp2", "tp2, odd heads"]
# Three heads of keys and values, of which a rank of two needs one and a half.
ODD = {**TIED["model"], "heads": 6, "kv_heads": 3}


def run(folder: str | Path, layout: dict[str, Any], **how: Any) -> dict[str, Any]:
    chosen = {**layout, "model": ODD} if layout.get("model") == "odd" else layout
    return train(folder, {**TIED, **chosen}, test_samples=5, state=torch.float64, **how)


def run_and_resume(folder: str, names: list[str]) -> dict[str, Any]:
    """On each rank: these layouts, each stopped after its second step and taken up again."""
    outcomes = {}
    for name in names:
        first = run(Path(folder, name), LAYOUTS[name], stop_after=2)
        second = run(Path(folder, name), LAYOUTS[name])
        outcomes[name] = {**second, **{key: first[key] + second[key] for key in ("loss", "grad_norm", "steps")}}
    return outcomes


@pytest.fixture(scope="module")
def singles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {name: run(tmp_path_factory.mktemp("single"), {"model": name} if name else {}) for name in ("", "odd")}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, FAST),
        pytest.param(2, [name for name in of_ranks(LAYOUTS, 2) if name not in FAST], marks=pytest.mark.slow),
        pytest.param(4, of_ranks(LAYOUTS, 4), marks=pytest.mark.slow),
    ],
)
def test_every_layout_trains_one_table(
    tmp_path: Path, torchrun: Torchrun, singles: dict[str, Any], world: int, names: list[str]
) -> None:
    outcomes = torchrun(run_and_resume, world, folder=str(tmp_path), names=names)[0]
    assert outcomes.keys() == set(names)
    for name, got in outcomes.items():
        single = singles[LAYOUTS[name].get("model", "")]
        assert got["steps"] == [1, 2, 3], name
        for series in ("loss", "grad_norm", "eval_loss"):
            assert got[series] == pytest.approx(single[series], rel=TOLERANCE, abs=0), (name, series)
        assert got["result"]["parameters"] == single["result"]["parameters"], name
        artifacts = DataLayout(tmp_path / name).job(JOB).artifacts
        assert "head.weight" not in load_file(artifacts / "model.safetensors"), name
        assert "lm_head.weight" not in load_file(artifacts / "huggingface" / "model.safetensors"), name
        assert json.loads((artifacts / "huggingface" / "config.json").read_bytes())["tie_word_embeddings"] is True


def test_the_table_has_the_sum_of_both_gradients() -> None:
    """Against the untied model with equal tables: its two gradients added up, and one table fewer."""
    described = {**TRANSFORMER["model"], "vocab_size": 50}
    tied = build(TransformerConfig(**described, tied_embeddings=True), dtype=torch.float64)
    apart = build(TransformerConfig(**described), dtype=torch.float64)
    table = tied.get_parameter("embedding.weight")
    assert tied.get_parameter("head.weight") is table
    apart.load_state_dict(tied.state_dict())
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(1))
    for model in (tied, apart):
        loss(model, tokens).backward()  # type: ignore[no-untyped-call]
    both = [apart.get_parameter(name).grad for name in ("embedding.weight", "head.weight")]
    assert table.grad is not None
    torch.testing.assert_close(table.grad, sum(each for each in both if each is not None))
    assert sum(each.numel() for each in apart.parameters()) - sum(each.numel() for each in tied.parameters()) == 50 * 32


def loss(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
