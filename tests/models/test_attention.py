"""Attention that is divided over ranks adds up to the whole, also where heads of keys and values do not divide."""

from __future__ import annotations

import pytest
import torch
from divided_tensors import copy_parts
from torch import nn

from service.jobs.spec.model import TransformerConfig
from service.models.transformer import Attention, Rotary
from service.parallel.mesh import SINGLE, Axis
from service.parallel.tensor import Replicated
from service.parallel.tensor.placement import places_of


def attention(config: TransformerConfig, axis: Axis) -> nn.Module:
    rotary = Rotary(config.head_features, config.max_sequence, config.rope_theta)
    return Attention(config, rotary, axis).double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_the_parts_of_all_ranks_add_up_to_the_whole(ranks: int, kv_heads: int, bias: bool) -> None:
    """Each rank by itself, as a group of one: sums over the group are taken here."""
    config = TransformerConfig(dim=16, heads=6, kv_heads=kv_heads, head_dim=4, max_sequence=8, qkv_bias=bias)
    generator = torch.Generator().manual_seed(1)
    whole = attention(config, SINGLE)
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    x = torch.randn(2, 7, 16, dtype=torch.float64, generator=generator)
    expected = whole(x, Replicated())
    expected.square().sum().backward()
    total = torch.zeros_like(expected)
    parts = []
    for rank in range(ranks):
        axis = Axis(ranks, rank)
        part = attention(config, axis)
        copy_parts(whole, part, axis)
        parts.append(part)
        total = total + part(x, Replicated())
    torch.testing.assert_close(total, expected)
    total.square().sum().backward()
    for name, parameter in whole.named_parameters():
        dimension = {place.name: place.dimension for place in places_of(parts[0])}[name]
        gradients = [part.get_parameter(name).grad for part in parts]
        assert all(each is not None for each in gradients)
        joined = sum(gradients) if dimension is None else torch.cat(gradients, dimension)  # type: ignore[arg-type]
        torch.testing.assert_close(joined, parameter.grad)
