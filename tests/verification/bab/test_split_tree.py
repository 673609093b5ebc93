"""The record of what a search split: every domain is in it once, as a node or as one of those below a node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from search_problems import model_from
from torch import nn

from service.bounds.methods import CROWN
from service.formats.vnnlib import Disjunct, Halfspace, Query
from service.verification.bab.decision import Decision, Technique
from service.verification.bab.driver import decide
from service.verification.bab.settings import SearchSettings
from service.verification.bab.split_tree import OPEN, SPLIT, STUCK, UNKNOWN, VERIFIED, SearchTree, SplitRecord
from service.verification.verdict import Verdict


def of(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64 if isinstance(numbers[0], float) else torch.int64)


def planted(most: int, roots: int = 1) -> tuple[SearchTree, torch.Tensor]:
    tree = SearchTree("activation splitting", 0, most, lambda number: f"neuron {number}")
    return tree, tree.plant(torch.full((roots,), -1.0))


def halved(tree: SearchTree, parents: torch.Tensor, on: int = 0) -> torch.Tensor:
    count = len(parents)
    margins = torch.full((2, count), -0.5)
    return tree.split(parents, torch.full((count,), on), torch.zeros(count), margins)


def test_a_tree_has_what_was_split_where_and_what_came_of_it() -> None:
    tree, roots = planted(10)
    above, below = halved(tree, roots, on=3)
    tree.record_proofs(above, of(0.25))
    halved(tree, below, on=4)
    found = tree.as_dict()
    assert found["parent"] == [None, 0, 0, 2, 2]
    assert [None if on is None else found["names"][on] for on in found["on"]] == [
        None, "neuron 3", "neuron 3", "neuron 4", "neuron 4",
    ]  # fmt: skip
    assert found["side"] == [0, 1, -1, 1, -1]
    assert found["state"] == [SPLIT, VERIFIED, SPLIT, OPEN, OPEN]
    assert found["margin"][1] == 0.25


def test_what_has_no_node_is_counted_at_the_last_one_that_has() -> None:
    tree, roots = planted(3)
    above, below = halved(tree, roots)
    deeper = halved(tree, halved(tree, above).flatten())
    tree.record_proofs(deeper.flatten()[:3], torch.ones(3))
    tree.stick(below)
    found = tree.as_dict()
    assert (found["below"], found["open_below"]) == ([0, 6, 0], [0, 1, 0])
    assert found["state"] == [SPLIT, SPLIT, STUCK]
    tree.stick(deeper.flatten()[3:])
    found = tree.as_dict()
    assert (found["open_below"], found["stuck_below"]) == ([0, 0, 0], [0, 1, 0])
    tree.finish()
    assert tree.as_dict()["open_below"] == [0, 0, 0]


def test_a_disjunct_that_begins_anew_has_only_what_is_split_since() -> None:
    tree, roots = planted(4, roots=2)
    halved(tree, roots[:1])
    assert bool((halved(tree, roots[1:]) < UNKNOWN).all())
    tree.restart(0)
    halved(tree, roots[:1], on=7)
    assert tree.as_dict()["names"] == ["neuron 7"]


def test_the_same_halves_are_recorded_once_if_memory_ran_out_after_the_first_time() -> None:
    tree, roots = planted(10)
    assert torch.equal(halved(tree, roots), halved(tree, roots))


def test_without_room_nothing_is_recorded() -> None:
    record = SplitRecord()
    tree = record.begin("input splitting", str)
    nodes = halved(tree, tree.plant(of(-1.0)))
    tree.record_proofs(nodes.flatten(), torch.ones(2))
    assert (nodes.tolist(), record.as_list()) == ([[UNKNOWN], [UNKNOWN]], [])


def decided(technique: Technique, most: int, threshold: float) -> tuple[Decision, list[dict[str, Any]]]:
    """Search whether an output of a small network is at most the threshold, splitting as told and attacking nothing."""
    torch.manual_seed(2)
    layers = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 1)).double()
    settings, record = SearchSettings(), SplitRecord(most)
    few = 3 if technique is Technique.INPUTS else 0
    settings = replace(settings, inputs=replace(settings.inputs, most_inputs=few), several_inputs=few)
    model = replace(model_from(layers, 3), settings=settings, splits=record)
    halfspace = Halfspace(((0, 1.0),), threshold)
    query = Query(3, 1, (Disjunct((-1.0,) * 3, (1.0,) * 3, (halfspace,)),))
    return decide(model, query, CROWN, 60, restarts=0), record.as_list()


@pytest.mark.parametrize("technique", [Technique.INPUTS, Technique.ACTIVATIONS])
def test_a_proof_is_a_tree_of_proved_leaves(technique: Technique) -> None:
    decision, (tree,) = decided(technique, 10_000, -0.1)
    assert (decision.verdict, tree["technique"]) == (Verdict.VERIFIED, technique.value)
    leaves = set(range(len(tree["state"]))) - set(tree["parent"])
    assert {tree["state"][leaf] for leaf in leaves} == {VERIFIED}
    assert all(tree["margin"][leaf] > 0 for leaf in leaves if technique is Technique.ACTIVATIONS)


@pytest.mark.parametrize("technique", [Technique.INPUTS, Technique.ACTIVATIONS])
def test_few_nodes_and_counts_tell_of_as_many_domains_as_many_nodes(technique: Technique) -> None:
    _, (whole,) = decided(technique, 10_000, -0.1)
    _, (part,) = decided(technique, 7, -0.1)
    assert len(part["state"]) == 7
    assert len(whole["state"]) == 7 + sum(part["below"])
    assert not any(part["open_below"])
