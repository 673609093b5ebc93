"""Transformers from their embedded tokens on: bounds are sound, and on a mesh they are those of one process."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import box_around, output_bounds, samples, tokens, transformer
from torch import Tensor, nn

from service.bounds.network import Network, prepare
from service.jobs.spec.model import TransformerConfig
from service.models import build
from service.models.transformer import AfterEmbedding, Transformer, embedded

CASES = {
    "tokens divided, a vocabulary that does not divide": (4, {"heads": 4, "kv_heads": 2, "vocab_size": 17}),
    "tokens replicated": (3, {"heads": 4, "kv_heads": 2}),
}
"""Tokens, and fields of the configuration."""
EPS = 1e-3
Ends = dict[str, list[Any]]
"""Bounds by method, the lower ones first."""


@pytest.mark.slow
def test_it_is_the_rest_of_the_model_also_after_tracing() -> None:
    """Layers share their rotary tables, which a tracer must not leave behind as tensors of its own."""
    config = TransformerConfig(vocab_size=16, dim=8, layers=2, ffn_dim=12, max_sequence=8)
    model = build(config, dtype=torch.float64, seed=4).requires_grad_(False)
    assert isinstance(model, Transformer)
    rest, ids = AfterEmbedding(model, 7), tokens(7)
    prepare(rest, (7, 8))
    x = embedded(model, ids)
    assert torch.equal(rest(x), model(ids)[:, -1])
    assert torch.equal(rest(x.flatten(1)), rest(x))


@pytest.mark.slow
def test_samples_lie_within_the_bounds() -> None:
    model = transformer(heads=4, kv_heads=2)
    module, x = AfterEmbedding(model, 4), embedded(model, tokens(4))
    network = prepare(module, (4, 8))
    for eps, method in product((0.0, 1e-3, 2e-2), ("ibp", "crown")):
        box = box_around(x, eps)
        bounds = output_bounds(network, box, method)
        outputs = module(samples(box, 100, torch.Generator().manual_seed(1)).flatten(0, 1)).unflatten(0, (100, 2))
        tolerance = 1e-9 * outputs.abs().max()
        assert bool((outputs >= bounds.lower - tolerance).all()), (eps, method)
        assert bool((outputs <= bounds.upper + tolerance).all()), (eps, method)
        if method == "crown" and eps == 1e-3:
            assert bounds.width.mean() < 6 * (outputs.amax(dim=0) - outputs.amin(dim=0)).mean()


class Streams(nn.Module):
    """Layers whose results stay divided, with activations there and values of both forms added up."""

    def __init__(self, axis: Any, sharded: bool) -> None:
        from service.parallel.tensor import ColumnParallelLinear, Replicated, RowParallelLinear, SequenceSharded

        super().__init__()
        self.axis, self.is_sharded = axis, sharded
        self.stream = SequenceSharded(axis) if sharded else Replicated(axis)
        self.into = nn.ModuleList(ColumnParallelLinear(3, 8, axis, copied_input=True) for _ in range(2))
        self.out = nn.ModuleList(RowParallelLinear(8, 3, axis, bias=False, partial_output=True) for _ in range(2))
        self.scale = nn.Parameter(torch.empty(3))

    def forward(self, x: Tensor) -> Tensor:
        from service.parallel.collectives import gather_from_group

        x = self.stream.divide(x)
        scale = self.stream.shared(self.scale)
        for into, out in zip(self.into, self.out, strict=True):
            x = torch.tanh(x * scale + self.stream.leave(out(torch.relu(into(self.stream.enter(x))))))
        return gather_from_group(x, 1, self.axis.group, self.axis.size) if self.is_sharded else x


def compare(alone: dict[str, Ends]) -> dict[str, dict[str, float]]:
    """Differences to one process, relative to the bounds' size, and how many relaxed values each rank has alone."""
    from meshes import start_mesh

    from service.parallel import distributed

    mesh = start_mesh(tp=2)
    found = {}
    for name, (sequence, fields) in CASES.items():
        models = transformer(**fields), transformer(mesh, **fields)
        whole, divided = (AfterEmbedding(model, sequence) for model in models)
        x = embedded(models[0], tokens(sequence))
        found[name] = _compared(prepare(divided, (sequence, 8), mesh.tp), x, EPS, alone[name])
        found[name]["embedded"] = float((embedded(models[1], tokens(sequence)) - x).abs().max())
        found[name]["function"] = float((divided(x) - whole(x)).abs().max())
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    divided, whole = _streams(mesh)
    found["streams"] = _compared(divided, x, 0.1, _ends(whole, x, 0.1))
    distributed.stop()
    return found


def _streams(mesh: Any) -> tuple[Network, Network]:
    from divided_tensors import copy_parts
    from nets import redraw

    from service.parallel.mesh import SINGLE

    whole, divided = Streams(SINGLE, False).double(), Streams(mesh.tp, True).double()
    redraw(whole, torch.Generator().manual_seed(5), scale=2)
    copy_parts(whole, divided, mesh.tp)
    return prepare(divided, (4, 3), mesh.tp), prepare(whole, (4, 3))


def _ends(network: Network, x: Tensor, eps: float) -> Ends:
    bounds = {method: output_bounds(network, box_around(x, eps), method) for method in ("ibp", "crown")}
    return {method: [each.lower.tolist(), each.upper.tolist()] for method, each in bounds.items()}


def _compared(divided: Network, x: Tensor, eps: float, alone: Ends) -> dict[str, float]:
    found = {}
    for method, ends in _ends(divided, x, eps).items():
        ours, whole = (torch.tensor(each, dtype=torch.float64) for each in (ends, alone[method]))
        found[method] = float((ours - whole).abs().max() / whole.abs().max())
    own = [divided.is_own(name) for node in divided.nonlinear for name in node.inputs]
    return {**found, "own": sum(own), "replicated": len(own) - sum(own)}


@pytest.mark.slow
@pytest.mark.distributed
def test_a_mesh_finds_the_bounds_of_one_process(torchrun: Any) -> None:
    alone = {}
    for name, (sequence, fields) in CASES.items():
        model = transformer(**fields)
        network = prepare(AfterEmbedding(model, sequence), (sequence, 8))
        alone[name] = _ends(network, embedded(model, tokens(sequence)), EPS)
    for result in torchrun(compare, 2, alone=alone):
        assert result.keys() == {*CASES, "streams"}
        for name, found in result.items():
            assert found.pop("own") > 0, name
            replicated = found.pop("replicated")
            assert (replicated > 0) == ("replicated" in name), "where tokens are divided, every value is"
            assert {case: difference for case, difference in found.items() if not difference <= 1e-10} == {}, name


@pytest.mark.slow
def test_next_tokens_are_certified_by_a_job(tmp_path: Path) -> None:
    (found,) = certify_tokens(str(tmp_path), [{}], layers=1)
    assert found["layers"] > 0
    assert len(found["rows"]) == 3
    for row in found["rows"]:
        assert len(row["lower"]) == 256
        assert all(low < high for low, high in zip(row["lower"], row["upper"], strict=True))
        assert row["verdict"] == "falsified", "an untrained model is wrong about the sample"
        assert len(row["counterexample"]) == 4 * 8


@pytest.mark.slow
@pytest.mark.distributed
def test_next_tokens_are_certified_on_a_mesh(tmp_path: Path, torchrun: Any) -> None:
    vocabulary = 257  # which two ranks cannot divide
    (alone,) = certify_tokens(str(tmp_path), [{}], vocabulary=vocabulary)
    meshes = [{"tp": 2}, {"pp": 2}]
    for divided in torchrun(certify_tokens, 2, folder=str(tmp_path), meshes=meshes, vocabulary=vocabulary)[0]:
        assert alone["layers"] == divided["layers"] > 0
        for row, expected in zip(divided["rows"], alone["rows"], strict=True):
            assert len(row["lower"]) == vocabulary
            assert row["lower"] == pytest.approx(expected["lower"], abs=2e-5 * max(map(abs, expected["lower"])))
            assert row["verdict"] == expected["verdict"]


def certify_tokens(
    folder: str, meshes: list[dict[str, int]], layers: int = 2, vocabulary: int = 256
) -> list[dict[str, Any]]:
    import os

    from verify_jobs import context

    from service.jobs.files import DataLayout
    from service.jobs.spec.verify import VerifySpec
    from service.parallel import distributed
    from service.verification import job

    model = {"family": "transformer", "dim": 8, "layers": layers, "heads": 2, "ffn_dim": 8, "max_sequence": 16}
    model |= {"vocab_size": vocabulary}
    asked = {"data": {"source": "tokens", "sequence": 4}, "count": 3, "eps": 1e-4}
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    found = []
    for degrees in meshes:
        fields = {"model": model, "property": {"robustness": asked}, "parallel": degrees, "device": "cpu"}
        name = "".join(degrees)
        ranked, report = context(DataLayout(Path(folder)), rank, world, job_id=f"job_{name:x>20}")
        result = job.run(VerifySpec.model_validate(fields), ranked)
        found.append({"rows": report.bounds, "layers": len(result["layers"]) if result else 0})
    distributed.stop()
    return found
