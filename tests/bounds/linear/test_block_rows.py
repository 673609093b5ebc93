"""Rows in blocks: the same bounds as dense rows, over fewer entries."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from nets import box_around
from torch import Tensor, nn

from service.bounds.linear.plain import Pass
from service.bounds.linear.rows.block import BlockRows, enclosing, in_block, lengths, reshaped
from service.bounds.methods import CROWN, BoundOptions
from service.bounds.methods import row_groups as grouping
from service.bounds.methods.base import elements_of_row
from service.bounds.network import Network, prepare
from service.jobs.spec.model import TransformerConfig
from service.models import build
from service.models.transformer import AfterEmbedding, Transformer, embedded

TOKENS = 6


class Mixer(nn.Module):
    """Attention without a mask, of operators that the transformer has not: additions of constants, means, negations."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        self.place = nn.Parameter(torch.randn(TOKENS, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x.flatten(1).reshape(-1, TOKENS, 4) + self.place
            scores = -(self.query(x) @ self.key(x).transpose(1, 2)).tanh()
            x = torch.cat([x, scores @ self.value(x)], dim=-1).reshape(-1, TOKENS, 2, 4).mean(dim=2)
        return x.flatten(1)


def _transformer() -> tuple[nn.Module, Tensor]:
    config = TransformerConfig(vocab_size=11, dim=8, layers=2, heads=2, ffn_dim=12, max_sequence=TOKENS)
    model = build(config, dtype=torch.float64, seed=4).requires_grad_(False)
    assert isinstance(model, Transformer)
    return AfterEmbedding(model, TOKENS), embedded(model, torch.arange(2 * TOKENS).reshape(2, TOKENS) % 11)


def _mixer() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Mixer().requires_grad_(False), torch.randn(2, TOKENS, 4, dtype=torch.float64)


def _bounds(network: Network, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        analysis = CROWN(network, box_around(x, 1e-3), BoundOptions())
    return [end for each in analysis.inputs.values() for bounds in each for end in (bounds.lower, bounds.upper)]


@pytest.mark.parametrize(("make", "share"), [(_transformer, 0.2), (_mixer, 0.7)])
def test_bounds_are_those_of_dense_rows(
    make: Callable[[], tuple[nn.Module, Tensor]], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one token go through its own entries before the attention, and behind a mask through no later token's."""
    module, x = make()
    network = prepare(module, tuple(x.shape[1:]))
    expected = _bounds(network, x)
    largest = list[float]()

    def noting(backward: Pass, name: str, index: Tensor) -> grouping.RowGroups:
        found = grouping.row_groups(backward, name, index)
        largest.extend(group.elements / elements_of_row(backward, name) for group in found.groups)
        return found

    monkeypatch.setattr("service.bounds.methods.layers.row_groups", noting)
    for limit in ("LEAST", "FEWEST"):
        monkeypatch.setattr(grouping, limit, {"cpu": 1})
    found = _bounds(network, x)
    assert min(largest) < share
    for own, dense in zip(found, expected, strict=True):
        assert torch.allclose(own, dense, rtol=1e-10, atol=1e-10)


def test_a_block_of_another_shape_has_the_same_entries() -> None:
    """Where a reshaped block is found, it is that of the entries; whole groups, single dimensions and first spans
    are.
    """
    shapes = [(4, 6), (4, 2, 3), (1, 4, 6), (4, 1, 6), (24,), (2, 2, 6), (4, 6, 1)]
    found = 0
    for shape, into in product(shapes, repeat=2):
        for spans in product(*([(0, 1), (0, n), (n // 2, n)] for n in shape)):
            other = reshaped(spans, shape, into)
            if other is None:
                continue
            found += 1
            marked = torch.zeros(shape, dtype=torch.bool)
            in_block(marked, spans).fill_(value=True)
            assert bool(in_block(marked.reshape(into), other).all())
            assert lengths(other) == tuple(in_block(marked.reshape(into), other).shape)
            assert int(marked.sum()) == torch.Size(lengths(other)).numel()
    assert found > 100


def test_sums_are_in_the_block_around_both() -> None:
    left = BlockRows(torch.ones(1, 2, 1, 2), ((1, 2), (0, 2)))
    right = BlockRows(torch.ones(3, 2, 2, 1), ((1, 3), (1, 2)))
    total = left.plus(right)
    assert total is not None
    assert total.block == ((1, 3), (0, 2))
    like = torch.empty(0)
    assert torch.equal(total.dense((4, 3), like), left.dense((4, 3), like) + right.dense((4, 3), like))
    marked = torch.zeros(4, 3, dtype=torch.bool)
    marked[1, 0] = marked[2, 1] = True
    assert enclosing(marked, ((0, 4), (0, 3))) == ((1, 3), (0, 2))
    assert torch.equal(total.cut(((2, 3), (0, 1))).values, total.values[:, :, 1:, :1])
