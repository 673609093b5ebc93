"""Entries that the output depends on, of a network that is divided over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from service.bounds.capture import capture
from service.bounds.network import from_graph
from service.bounds.shard import shard
from service.jobs.spec.common import ParallelSpec
from service.parallel import distributed
from service.parallel.mesh import build as build_mesh

pytestmark = pytest.mark.distributed
TOKENS, WIDTH, HIDDEN = 4, 6, 10


class FirstToken(nn.Module):
    """Two layers for each token, of which the answer reads the first."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing, self.up, self.down = (
            nn.Linear(TOKENS, TOKENS),
            nn.Linear(WIDTH, HIDDEN),
            nn.Linear(HIDDEN, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.tanh(self.mixing(x.transpose(1, 2)).transpose(1, 2))
        return torch.tanh(mixed + self.down(torch.relu(self.up(mixed))))[:, 0]


def needed() -> dict[str, list[Any]]:
    """Return of each value whether it is divided, and how many entries of each token are needed on all ranks."""
    distributed.start("cpu")
    torch.manual_seed(0)
    graph, mesh = capture(FirstToken().eval(), (TOKENS, WIDTH)), build_mesh(ParallelSpec(tp=2), "cpu")
    network = from_graph(shard(graph, mesh.tp), mesh.tp)
    found = dict[str, list[Any]]()
    for name, mask in network.needed.items():
        counts = mask.reshape(network.nodes[name].shape).sum(dim=1)
        own = network.is_own(name)
        found[name] = [own, (network.tp_group.sum(counts) if own else counts).tolist()]
    distributed.stop()
    return found


def test_each_rank_knows_which_of_its_entries_are_needed(torchrun: Any) -> None:
    first, second = torchrun(needed, 2)
    assert first == second
    torch.manual_seed(0)
    alone = from_graph(capture(FirstToken().eval(), (TOKENS, WIDTH)))
    for name, mask in alone.needed.items():
        assert first[name][1] == mask.reshape(alone.nodes[name].shape).sum(dim=1).tolist()
    assert [True, [HIDDEN, 0, 0, 0]] in first.values()
    assert [False, [WIDTH, 0, 0, 0]] in first.values()
