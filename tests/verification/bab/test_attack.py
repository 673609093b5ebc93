"""Attacks: they find what is there, stay inside, and return only confirmed counterexamples."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from search_problems import model_from, specification_of_cases
from torch import Tensor, nn

from service.bounds.interval import Interval
from service.formats.vnnlib import Disjunct, Halfspace, Query
from service.verification.bab.attack import attack, attack_boxes, attack_from_many_samples
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.settings import AttackSettings, SearchSettings
from service.verification.bab.specification import specifications

if TYPE_CHECKING:
    from service.bounds.onnx.model import Running

CPU = torch.device("cpu")


class Wells(nn.Module):
    """Two narrow wells of different depth on a plain: gradients lead into them only from nearby."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.exp(-400 * ((x - 0.3) * (x - 0.3)).sum(dim=1, keepdim=True))
        second = torch.exp(-400 * ((x + 0.6) * (x + 0.6)).sum(dim=1, keepdim=True))
        return torch.cat([1 - first - 0.5 * second, 1 - 0.5 * first - second], dim=1)


class Counting(Wells):
    """Keeps the size of each batch, and whether there will be a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[int, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.batches.append((len(x), x.requires_grad))
        return super().forward(x)


@pytest.fixture(scope="module")
def wells() -> ModelUnderVerification:
    return model_from(Wells(), 2)


@pytest.mark.parametrize("output", [0, 1])
def test_every_disjunct_is_aimed_at(wells: ModelUnderVerification, output: int) -> None:
    cases = [[({output: 1.0}, 0.1)], [({1 - output: 1.0}, -1.0)]]
    found = attack(wells, specification_of_cases([-1.0, -1.0], [1.0, 1.0], *cases))
    assert found is not None
    assert all(abs(each - (0.3, -0.6)[output]) < 0.1 for each in found)


def test_a_conjunction_is_not_met_by_its_parts(wells: ModelUnderVerification) -> None:
    deep = specification_of_cases([-1.0, -1.0], [1.0, 1.0], [({0: 1.0}, 0.4), ({1: 1.0}, 0.4)])
    assert attack(wells, deep) is None
    shallow = specification_of_cases([-1.0, -1.0], [1.0, 1.0], [({0: 1.0}, 0.4), ({1: 1.0}, 0.9)])
    assert attack(wells, shallow) is not None


def test_counterexamples_stay_in_the_box_and_on_fixed_inputs(wells: ModelUnderVerification) -> None:
    found = attack(wells, specification_of_cases([0.31, -1.0], [0.31, 0.28], [({0: 1.0}, 0.3)]))
    assert found is not None
    assert found[0] == 0.31
    assert found[1] <= 0.28


def test_rare_counterexamples_need_many_samples(wells: ModelUnderVerification) -> None:
    nearly = specification_of_cases([-1.0, -1.0], [1.0, 1.0], [({0: 1.0}, 1e-7)])
    found = attack_from_many_samples(wells, nearly, 20_000, 1, time.monotonic() + 600)
    assert found is not None
    assert all(abs(each - 0.3) < 1e-3 for each in found)


def test_a_search_attacks_from_as_many_starts_whatever_the_attack_before_it_has(wells: ModelUnderVerification) -> None:
    never = specification_of_cases([-1.0, -1.0], [1.0, 1.0], [({0: 1.0}, -9.0)])
    for restarts in (0, 1, 1000):
        module = Counting()
        under = replace(wells, module=module, settings=SearchSettings(attack=AttackSettings(restarts=restarts)))
        assert attack_from_many_samples(under, never, 2_000, 1, time.monotonic() + 600) is None
        assert module.batches == [(2_000, False)] + [(256, True)] * 60 + [(256, False)]


def test_as_many_candidates_are_looked_at_as_the_caller_has(wells: ModelUnderVerification) -> None:
    """The first nine of twelve are denied by the other runtime."""

    class Denying:
        calls = 0

        def flat(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            self.calls += 1
            return np.full(2, 1.0 if self.calls <= 9 else -1.0)

    specification = specification_of_cases([-1.0, -1.0], [1.0, 1.0], [({0: 1.0}, 0.1)])
    candidates = torch.full((12, 2), 0.3, dtype=torch.float64)
    runtime = cast("Running", Denying())
    assert replace(wells, runtime=runtime).first_confirmed(specification, candidates) is not None


def test_boxes_are_tried_one_by_one(wells: ModelUnderVerification) -> None:
    specification = specification_of_cases([-1.0, -1.0], [1.0, 1.0], [({0: 1.0}, 0.1)])
    lower = torch.tensor([[-1.0, -1.0], [0.25, 0.25], [0.6, 0.6]], dtype=torch.float64)
    centre = torch.full((1, 2), 0.5, dtype=torch.float64)
    found = attack_boxes(wells, specification, Interval(lower, lower + 0.1), centre, 100)
    assert found is not None
    assert all(0.25 <= each <= 0.35 for each in found)
    without, module = lower[[0, 2]], Counting()
    assert (
        attack_boxes(replace(wells, module=module), specification, Interval(without, without + 0.1), centre, 9) is None
    )
    assert module.batches == [(2, False)] + [(2, True)] * 3 + [(2, False)]


def test_what_the_judge_denies_is_no_counterexample(wells: ModelUnderVerification) -> None:
    class Above(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones(len(x), 2, dtype=x.dtype)

    specification = specification_of_cases([-1.0, -1.0], [1.0, 1.0], [({0: 1.0}, 0.1)])
    assert attack(wells, specification) is not None
    assert attack(replace(wells, float64_module=Above()), specification) is None


def test_an_attack_without_time_stops_at_the_first_step(wells: ModelUnderVerification) -> None:
    deep = specification_of_cases([-1.0, -1.0], [1.0, 1.0], [({0: 1.0}, 1e-9)])
    assert attack(wells, deep, time.monotonic() - 1) is None


def test_the_same_seed_finds_the_same(wells: ModelUnderVerification) -> None:
    specification = specification_of_cases([-1.0, -1.0], [1.0, 1.0], [({0: 1.0}, 0.2)])
    assert attack(wells, specification, seed=3) == attack(wells, specification, seed=3)


def test_very_many_starts_descend_in_parts_to_the_nearest_disjuncts_first(wells: ModelUnderVerification) -> None:
    few = SearchSettings(attack=AttackSettings(restarts=64, together=24))
    under = replace(wells, settings=few)
    cases = [*([[({0: 1.0}, -1.0)]] * 2), [({0: 1.0}, 0.1)]]
    assert attack(under, specification_of_cases([-1.0, -1.0], [1.0, 1.0], *cases)) is not None
    seen: list[int] = []

    def late(_: float) -> bool:
        seen.append(1)
        return len(seen) > 1

    engine = copy.copy(under.engine)
    object.__setattr__(engine, "late", late)
    assert attack(replace(under, engine=engine), specification_of_cases([-1.0] * 2, [1.0] * 2, *cases[:2])) is None
    assert len(seen) <= 4, "a deadline is looked at between the parts"


class Ramp(nn.Module):
    """``1 − (3 x + 1)`` of both signs beside its own ceiling: next to 0 float64 rounds both to 0."""

    def forward(self, x: Tensor) -> Tensor:
        y = 1 - (3 * x + 1)
        return torch.cat([torch.relu(y) + torch.relu(-y), torch.ceil(x)], dim=1)


@pytest.mark.parametrize("output", [0, 1])
def test_what_float64_rounds_to_a_counterexample_is_none(output: int) -> None:
    """The network takes a threshold at an end that its interval lacks, and in it nowhere."""
    subject, nearest = model_from(Ramp(), 1), torch.tensor([[5e-324]], dtype=torch.float64)
    for open_lower, is_found in ((frozenset({0}), False), (frozenset[int](), True)):
        case = Disjunct((0.0,), (1.0,), (Halfspace(((output, 1.0),), 0.0),), open_lower)
        (specification,) = specifications(Query(1, 2, (case,)), CPU)
        x = nearest if open_lower else 0 * nearest
        assert (subject.first_confirmed(specification, x) is not None) is is_found
