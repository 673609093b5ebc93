"""What bounds take on a tensor-parallel mesh is divided by its ranks, and limited for each of them."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.distributed

LIMIT = 2**14
"""Elements of a coefficient tensor."""


def taken() -> dict[str, dict[str, list[float]]]:
    """By CROWN on two ranks and in one process: bytes at most, and of the largest tensor where rows walk in parts."""
    import torch
    from census import largest_bytes, peak_bytes
    from nets import box_around

    from service.bounds.methods import METHODS, Effort
    from service.bounds.network import prepare
    from service.jobs.spec.base import ParallelSpec
    from service.jobs.spec.model import MlpConfig, TransformerConfig
    from service.models import build
    from service.models.embedded import AfterEmbedding
    from service.models.transformer import Transformer
    from service.parallel import distributed
    from service.parallel.mesh import build as build_mesh
    from service.parallel.mesh import plan

    tokens, dim = 4, 32

    def mlp(mesh: Any) -> tuple[Any, tuple[int, ...]]:
        return build(MlpConfig(in_features=32, hidden=(256, 32, 256, 32), out_features=4), mesh), (32,)

    def transformer(mesh: Any) -> tuple[Any, tuple[int, ...]]:
        config = TransformerConfig(
            vocab_size=16, dim=dim, layers=1, heads=4, kv_heads=4, ffn_dim=4 * dim, max_sequence=tokens
        )
        module = build(config, mesh)
        assert isinstance(module, Transformer)
        return AfterEmbedding(module, tokens), (tokens, dim)

    distributed.start("cpu")
    single, mesh = plan(ParallelSpec()), build_mesh(ParallelSpec(tp=2), "cpu")
    found: dict[str, dict[str, list[float]]] = {}
    for make, radius in ((mlp, 1.0), (transformer, 1e-3)):
        found[make.__name__] = {"most": [], "largest": []}
        for each in (mesh, single):
            module, shape = make(each)
            network = prepare(module.eval().requires_grad_(False), shape, each.tp)
            box = box_around(torch.randn(1, *shape, generator=torch.Generator().manual_seed(1)), radius)
            rows = torch.eye(network.graph.output.size)[None].reshape(1, -1, *network.graph.output.shape)

            def bound(effort: Effort, network: Any = network, box: Any = box, rows: Any = rows) -> None:
                with torch.no_grad():
                    METHODS["crown"](network, box, effort).lower_bounds(rows)

            bound(Effort())
            found[make.__name__]["most"].append(peak_bytes(lambda bound=bound: bound(Effort())))
            found[make.__name__]["largest"].append(largest_bytes(lambda bound=bound: bound(Effort(elements=LIMIT))))
    distributed.stop()
    return found


def test_two_ranks_take_half_each_and_each_up_to_its_own_limit(torchrun: Any) -> None:
    for found in torchrun(taken, 2):
        for on_a_mesh, alone in (model["most"] for model in found.values()):
            assert on_a_mesh <= 0.55 * alone
        # The limit is of a rank's own tensors: each takes as much as one process does.
        for largest in found["mlp"]["largest"]:
            assert 0.9 * LIMIT <= largest / 4 <= LIMIT
