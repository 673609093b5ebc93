"""What bounds take on a tensor-parallel mesh is divided by its ranks, and limited for each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from meshes import start_mesh
from nets import box_around
from peak_storage import largest_bytes, peak_bytes
from torch import nn

from service.bounds.interval import Interval
from service.bounds.methods import METHODS, Analysis, BoundOptions
from service.bounds.network import Network, prepare
from service.bounds.stages import StageLink, prepare_stages
from service.jobs.spec.common import ParallelSpec
from service.jobs.spec.model import MlpConfig, TransformerConfig
from service.models import build
from service.models.transformer import AfterEmbedding, Transformer
from service.parallel import distributed
from service.parallel.mesh import Mesh, plan

pytestmark = pytest.mark.distributed

TOKENS, DIM = 4, 32
LIMIT = 2**14
"""Elements of a coefficient tensor."""


def mlp(mesh: Mesh) -> tuple[nn.Module, tuple[int, ...]]:
    return build(MlpConfig(in_features=32, hidden=(256, 32, 256, 32), out_features=4), mesh), (32,)


def transformer(mesh: Mesh) -> tuple[nn.Module, tuple[int, ...]]:
    config = TransformerConfig(
        vocab_size=16, dim=DIM, layers=1, heads=4, kv_heads=4, ffn_dim=8 * DIM, max_sequence=TOKENS
    )
    module = build(config, mesh)
    assert isinstance(module, Transformer)
    return AfterEmbedding(module, TOKENS), (TOKENS, DIM)


def bounding(mesh: Mesh, module: nn.Module, shape: tuple[int, ...], radius: float) -> Callable[[BoundOptions], None]:
    """CROWN on all outputs."""
    network = prepare(module.eval().requires_grad_(False), shape, mesh.tp)
    box = box_around(torch.randn(1, *shape, generator=torch.Generator().manual_seed(1)), radius)
    rows = torch.eye(network.graph.output.size)[None].reshape(1, -1, *network.graph.output.shape)

    def bound(options: BoundOptions) -> None:
        with torch.no_grad():
            METHODS["crown"](network, box, options).lower_bounds(rows)

    bound(BoundOptions())
    return bound


def taken() -> dict[str, dict[str, list[float]]]:
    """On two ranks and in one process: bytes at most, and of the largest tensor where rows go in parts.

    What one process takes is asked on the first rank only.
    """
    single, mesh = plan(ParallelSpec()), start_mesh(tp=2)
    found: dict[str, dict[str, list[float]]] = {}
    for make, radius in ((mlp, 1.0), (transformer, 1e-3)):
        places = (mesh, single) if mesh.tp.rank == 0 else (mesh,)
        ways = [bounding(each, *make(each), radius) for each in places]
        # Gloo's thread may let go of a buffer late: the least of five runs.
        most: list[float] = [min(peak_bytes(partial(ways[0], BoundOptions())) for _ in range(5))]
        found[make.__name__] = {"most": most + [peak_bytes(partial(way, BoundOptions())) for way in ways[1:]]}
        if make is mlp:
            found["mlp"]["largest"] = [largest_bytes(partial(way, BoundOptions(elements=LIMIT))) for way in ways]
    distributed.stop()
    return found


@pytest.mark.slow(30)
def test_two_ranks_take_half_each_and_each_up_to_its_own_limit(torchrun: Any) -> None:
    first, second = torchrun(taken, 2)
    for name, (on_a_mesh, alone) in ((name, model["most"]) for name, model in first.items()):
        assert max(on_a_mesh, *second[name]["most"]) <= 0.55 * alone
    for found in (first, second):
        # The limit is of a rank's own tensors: each takes as much as one process does.
        for largest in found["mlp"]["largest"]:
            assert 0.9 * LIMIT <= largest / 4 <= LIMIT


def options_of_stages() -> list[int]:
    """What a method is given on this rank, where the second stage's device has twice the memory."""
    mesh, cpu = start_mesh(pp=2), torch.device("cpu")
    module = build(MlpConfig(in_features=8, hidden=(8, 8), out_features=4), mesh).requires_grad_(False)
    staged = prepare_stages(module, (8,), mesh.tp, StageLink(mesh, cpu))
    given: list[int] = []

    def method(network: Network, box: Interval, options: BoundOptions) -> Analysis:
        given.append(options.elements)
        return METHODS["crown"](network, box, options)

    def within(self: BoundOptions, device: torch.device, least: Callable[[int], int]) -> BoundOptions:
        return replace(self, elements=least(1000 * (1 + mesh.pp.rank)))

    with patch.object(BoundOptions, "within", within):
        staged.method(method)(staged.network, box_around(torch.zeros(1, 8), 0.1), BoundOptions())
    distributed.stop()
    return given


@pytest.mark.slow
def test_stages_take_parts_that_fit_each_of_them(torchrun: Any) -> None:
    assert torchrun(options_of_stages, 2) == [[1000], [1000]]
