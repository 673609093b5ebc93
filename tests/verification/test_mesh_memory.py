"""What bounds take on a tensor-parallel mesh is divided by its ranks."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.distributed


def peaks() -> dict[str, float]:
    """Of CROWN on this rank, as shares of what one process takes; rows walk in parts on both."""
    import torch
    from census import peak_bytes
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
    found = {}
    for make, elements in ((mlp, 2**14), (transformer, 2**16)):
        taken = []
        for each in (mesh, single):
            module, shape = make(each)
            network = prepare(module.eval().requires_grad_(False), shape, each.tp)
            box = box_around(torch.randn(1, *shape, generator=torch.Generator().manual_seed(1)), 1e-3)
            rows = torch.eye(network.graph.output.size)[None].reshape(1, -1, *network.graph.output.shape)

            def bound(network: Any = network, box: Any = box, rows: Any = rows, elements: int = elements) -> None:
                with torch.no_grad():
                    METHODS["crown"](network, box, Effort(elements=elements)).lower_bounds(rows)

            bound()
            taken.append(peak_bytes(bound))
        found[make.__name__] = taken[0] / taken[1]
    distributed.stop()
    return found


def test_two_ranks_take_half_each(torchrun: Any) -> None:
    for found in torchrun(peaks, 2):
        assert found["mlp"] <= 0.55
        assert found["transformer"] <= 0.55
