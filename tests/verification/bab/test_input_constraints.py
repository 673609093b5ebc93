"""Linear constraints of inputs: what satisfies them is searched, and nothing else is a counterexample."""

from __future__ import annotations

import importlib
from fractions import Fraction

import pytest
import torch
from search_problems import model_from
from torch import nn

from service.bounds.methods import CROWN
from service.formats.vnnlib import VnnlibError, parse
from service.verification.bab.decision import Technique
from service.verification.bab.driver import decide
from service.verification.verdict import Verdict

deciding = importlib.import_module("service.verification.bab.driver")
DECLARED = "".join(f"(declare-const {name} Real)" for name in ("X_0", "X_1", "Y_0", "Y_1"))
BOX = "".join(f"(assert (<= X_{index} 1))(assert (>= X_{index} -1))" for index in range(2))


def summing() -> nn.Module:
    """``y0 = relu(x0) + relu(x1)``, ``y1 = x0 + x1``."""
    first, last = nn.Linear(2, 4), nn.Linear(4, 2)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]))
        last.weight.copy_(torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, -1.0, -1.0]]))
        first.bias.zero_()
        last.bias.zero_()
    return nn.Sequential(first, nn.ReLU(), last).double().requires_grad_(False)


@pytest.mark.parametrize(
    ("constraint", "unsafe", "verdict"),
    [
        ("(<= (+ X_0 X_1) 1)", "(>= Y_1 1.01)", Verdict.VERIFIED),
        ("(<= (+ X_0 X_1) 1)", "(>= Y_1 0.99)", Verdict.FALSIFIED),
        ("(<= (+ X_0 X_1) -0.5)", "(>= Y_0 1.2)", Verdict.VERIFIED),
        ("(<= (+ X_0 X_1) -0.5)", "(>= Y_0 0.4)", Verdict.FALSIFIED),
        ("(and (<= (+ X_0 X_1) 1) (>= X_0 X_1))", "(>= Y_0 1.05)", Verdict.VERIFIED),
        ("(or (>= X_0 (+ X_1 1.5)) (>= X_1 (+ X_0 1.5)))", "(>= Y_1 0.6)", Verdict.VERIFIED),
        ("(or (>= X_0 (+ X_1 1.5)) (>= X_1 (+ X_0 1.5)))", "(>= Y_1 0.4)", Verdict.FALSIFIED),
    ],
)
def test_a_query_with_constraints_is_decided(constraint: str, unsafe: str, verdict: Verdict) -> None:
    query = parse(f"{DECLARED}{BOX}(assert {constraint})(assert {unsafe})")
    found = decide(model_from(summing(), 2), query, CROWN, 60.0)
    assert found.verdict is verdict
    if found.counterexample is not None:
        x = [Fraction(each) for each in found.counterexample]
        assert any(all(each.contains(x, x) for each in one.constraints) for one in query.disjuncts)


@pytest.mark.parametrize("technique", [Technique.INPUTS, Technique.ACTIVATIONS])
def test_what_only_an_input_satisfies_that_the_constraints_exclude_is_never_falsified(
    technique: Technique, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negative threshold of a constraint says nothing about outputs, for programs of split activations either."""
    monkeypatch.setattr(deciding, "technique_for", lambda *_: technique)
    for unsafe, verdict in (("(>= Y_0 0.9)", Verdict.FALSIFIED), ("(>= Y_1 -0.4)", Verdict.VERIFIED)):
        query = parse(f"{DECLARED}{BOX}(assert (<= (+ X_0 (* 2 X_1)) -1))(assert (<= X_1 X_0))(assert {unsafe})")
        if verdict is Verdict.VERIFIED:
            query = parse(f"{DECLARED}{BOX}(assert (<= (+ X_0 X_1) -0.5))(assert (>= Y_1 -0.4))")
        found = decide(model_from(summing(), 2), query, CROWN, 1.0)
        assert found.verdict in {verdict, Verdict.UNKNOWN}
        assert found.verdict is verdict or technique is Technique.ACTIVATIONS


def test_a_box_is_drawn_around_its_constraints() -> None:
    (one,) = parse(f"{DECLARED}{BOX}(assert (<= (+ (* 2 X_0) X_1) -2))(assert (>= Y_0 1))").disjuncts
    assert (one.lower, one.upper) == ((-1, -1), (Fraction(-1, 2), 0))
    assert len(one.constraints) == 1
    with_ends = f"{DECLARED}(assert (<= X_0 1))(assert (>= X_0 0))(assert (= X_1 X_0))(assert (>= Y_0 1))"
    (equal,) = parse(with_ends).disjuncts
    assert (equal.lower, equal.upper) == ((0, 0), (1, 1)), "an end may come from a constraint alone"


def test_constraints_that_nothing_satisfies_leave_no_disjunct() -> None:
    assert not parse(f"{DECLARED}{BOX}(assert (>= (+ X_0 X_1) 3))(assert (>= Y_0 1))").disjuncts


def test_inputs_are_not_compared_with_outputs() -> None:
    with pytest.raises(VnnlibError, match="inputs and outputs in comparisons of their own"):
        parse(f"{DECLARED}{BOX}(assert (<= (+ X_0 Y_1) 0))")
