"""Tensor-parallel layers and collectives on real ranks against the dense single-process computation, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from divided_tensors import whole
from torch import Tensor, nn
from torch.nn import functional

from service.jobs.spec.common import ParallelSpec
from service.jobs.spec.model import MlpConfig, TransformerConfig
from service.models import build
from service.parallel import distributed, mesh
from service.parallel.collectives import (
    GroupError,
    copy_to_group,
    gather_from_group,
    gather_with_reduce_from_group,
    max_over_group,
    reduce_from_group,
    reduce_scatter_to_group,
    scatter_to_group,
)
from service.parallel.local_copy import local_copy
from service.parallel.tensor import vocabulary_parallel_cross_entropy

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-10
TRANSFORMER = TransformerConfig(vocab_size=32, dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=24, max_sequence=12)
MLPS = {
    "even": MlpConfig(in_features=5, hidden=(8, 12), out_features=3, activation="tanh"),
    "odd": MlpConfig(in_features=5, hidden=(8, 4, 6), out_features=3, activation="gelu"),
}


def distance(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a - b).abs().max())


def gradient_distance(parallel: nn.Module, dense: nn.Module) -> float:
    wanted = dict(dense.named_parameters())
    return max(distance(whole(p.grad), wanted[name].grad) for name, p in parallel.named_parameters())


def check_mlp(config: MlpConfig, grid: mesh.Mesh) -> dict[str, float]:
    dense = build(config, dtype=torch.float64, seed=3)
    parallel = build(config, grid, dtype=torch.float64, seed=3)
    torch.manual_seed(0)
    x, targets = torch.randn(7, config.in_features, dtype=torch.float64), torch.randint(0, config.out_features, (7,))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    logits = [model(each) for model, each in zip((dense, parallel), inputs, strict=True)]
    for each in logits:
        functional.cross_entropy(each, targets).backward()
    return {
        "logits": distance(logits[1], logits[0]),
        "gradients": gradient_distance(parallel, dense),
        "input_gradient": distance(inputs[1].grad, inputs[0].grad),
    }


def check_transformer(grid: mesh.Mesh) -> dict[str, Any]:
    dense = build(TRANSFORMER, dtype=torch.float64, seed=3)
    parallel = build(TRANSFORMER, grid, dtype=torch.float64, seed=3)
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, 32, (2, 3, 10))
    expected = dense(tokens)
    shard = parallel(tokens)
    losses = [
        vocabulary_parallel_cross_entropy(expected, targets, dense.output_axis),
        vocabulary_parallel_cross_entropy(shard, targets, parallel.output_axis),
    ]
    for loss in losses:
        loss.backward()
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.5) for model in (dense, parallel)]
    return {
        "shard": list(shard.shape),
        "logits": distance(gather_from_group(shard, -1, grid.tp.group, grid.tp.size), expected),
        "loss": distance(losses[1], losses[0]),
        "gradients": gradient_distance(parallel, dense),
        "clipped_norm": abs(float(whole(norms[1])) - float(norms[0])),
        "local_copy": distance(local_copy(parallel)(tokens), shard),
        "kinds": sorted({type(p).__name__ for p in parallel.parameters()}),
    }


def check_compiled(grid: mesh.Mesh) -> dict[str, float]:
    """The same gradients through ``torch.compile(fullgraph=True)`` with the group launched."""
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, 32, (2, 3, 10))
    gradients, losses = [], []
    for compiled in (False, True):
        model = build(TRANSFORMER, grid, dtype=torch.float64, seed=3)
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        losses.append(vocabulary_parallel_cross_entropy(run(tokens), targets, grid.tp))
        losses[-1].backward()
        gradients.append([p.grad.to_local() for p in model.parameters()])
    return {
        "loss": distance(*losses),
        "gradients": max(distance(a, b) for a, b in zip(*gradients, strict=True)),
    }


def check_cross_entropy(grid: mesh.Mesh) -> dict[str, float]:
    torch.manual_seed(1)
    logits = (torch.randn(4, 6, 10, dtype=torch.float64) * 300).requires_grad_()
    targets = torch.randint(0, 10, (4, 6))
    expected = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    (gradient,) = torch.autograd.grad(expected, logits)
    width = 10 // grid.tp.size
    own = logits.detach()[..., grid.tp.rank * width : (grid.tp.rank + 1) * width].clone().requires_grad_()
    loss = vocabulary_parallel_cross_entropy(own, targets, grid.tp)
    loss.backward()
    half = vocabulary_parallel_cross_entropy(own.detach().bfloat16(), targets, grid.tp)
    certain = torch.tensor([9.0 * (grid.tp.rank == 0), 0, 0, 0, 0], dtype=torch.bfloat16, requires_grad=True)
    vocabulary_parallel_cross_entropy(certain[None], torch.tensor([0]), grid.tp).backward()
    assert certain.grad is not None
    return {
        "certain": float(certain.grad[0]),
        "loss": distance(loss, expected),
        "gradient": distance(own.grad, gradient[..., grid.tp.rank * width : (grid.tp.rank + 1) * width]),
        "bfloat16": float(half - expected) / float(expected),
    }


def check_collectives(grid: mesh.Mesh) -> dict[str, Any]:
    """Each operator's value and gradient, weighted by rank-dependent factors; then a second derivative."""
    group, size, rank = grid.tp.group, grid.tp.size, grid.tp.rank
    x = torch.arange(8, dtype=torch.float64).reshape(2, 4) + 10 * rank
    x.requires_grad_()
    weight = float(rank + 1)

    def value_and_gradient(y: Tensor) -> list[Any]:
        (gradient,) = torch.autograd.grad((weight * y).sum(), x)
        return [y.tolist(), gradient.tolist()]

    found = {
        "copy": value_and_gradient(copy_to_group(x, group)),
        "reduce": value_and_gradient(reduce_from_group(x, group)),
        "gather": value_and_gradient(gather_from_group(x, 1, group, size)),
        "scatter": value_and_gradient(scatter_to_group(x, 1, group, size)),
        "reduce_scatter": value_and_gradient(reduce_scatter_to_group(x, -1, group, size)),
        "gather_with_reduce": value_and_gradient(gather_with_reduce_from_group(x, -1, group, size)),
        "max": max_over_group(x, group).tolist(),
    }
    (first,) = torch.autograd.grad(weight * (reduce_from_group(x, group) ** 2).sum(), x, create_graph=True)
    found["second"] = torch.autograd.grad(first.sum(), x)[0].tolist()
    try:
        scatter_to_group(x, 0, group, 3)
    except GroupError as error:
        found["refused"] = str(error)
    return found


def everything(tp: int) -> dict[str, Any]:
    device = distributed.start("cpu")
    grid = mesh.build(ParallelSpec(tp=tp), device.type)
    found = {
        "even": check_mlp(MLPS["even"], grid),
        "odd": check_mlp(MLPS["odd"], grid),
        "transformer": check_transformer(grid),
        "cross_entropy": check_cross_entropy(grid),
        "collectives": check_collectives(grid),
    }
    distributed.stop()
    return found


def compiled(tp: int) -> dict[str, float]:
    device = distributed.start("cpu")
    found = check_compiled(mesh.build(ParallelSpec(tp=tp), device.type))
    distributed.stop()
    return found


@pytest.mark.slow
def test_compiled_ranks_equal_uncompiled_ones(torchrun: Any) -> None:
    for found in torchrun(compiled, ranks=2, tp=2):
        assert max(found.values()) < TOLERANCE, found


def test_two_ranks_equal_one(torchrun: Any) -> None:
    for rank, found in enumerate(torchrun(everything, ranks=2, tp=2)):
        assert max(found["even"].values()) < TOLERANCE, found["even"]
        assert max(found["odd"].values()) < TOLERANCE, found["odd"]
        transformer = found["transformer"]
        assert transformer.pop("shard") == [3, 10, 16]
        assert transformer.pop("kinds") == ["DTensor"]
        assert max(transformer.values()) < TOLERANCE, transformer
        entropy = found["cross_entropy"]
        assert abs(entropy.pop("bfloat16")) < 1e-2
        assert entropy.pop("certain") == pytest.approx((1, -9)[rank == 0] / (math.exp(9) + 9), rel=1e-2)
        assert max(entropy.values()) < TOLERANCE, entropy
        assert_collectives(rank, found["collectives"])


def assert_collectives(rank: int, found: dict[str, Any]) -> None:
    base = torch.arange(8, dtype=torch.float64).reshape(2, 4)
    ranks = [base, base + 10]
    own, columns = ranks[rank], slice(2 * rank, 2 * rank + 2)
    factor = rank + 1.0
    total = sum(ranks)
    padded = torch.zeros_like(base)
    padded[:, :2], padded[:, 2:] = 1.0, 2.0
    assert found["copy"] == [own.tolist(), torch.full_like(base, 3.0).tolist()]
    assert found["reduce"] == [total.tolist(), torch.full_like(base, factor).tolist()]
    assert found["gather"] == [torch.cat(ranks, 1).tolist(), torch.full_like(base, factor).tolist()]
    assert found["scatter"] == [own[:, columns].tolist(), padded.tolist()]
    assert found["reduce_scatter"] == [total[:, columns].tolist(), padded.tolist()]
    assert found["gather_with_reduce"] == [torch.cat(ranks, 1).tolist(), torch.full_like(base, 3.0).tolist()]
    assert found["max"] == ranks[1].tolist()
    # The first gradient is 2·weight·Σx. Its own gradient passes the copy, whose adjoint sums ones over both ranks.
    assert found["second"] == torch.full_like(base, 2 * factor * 2).tolist()
    assert "a dimension of 2 does not divide among 3 ranks" in found["refused"]
