"""Numbers of a property are exact: no rounding of what a text says makes a wrong verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import inf, nextafter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lanes import examples, first_fast, slow_but_for
from onnx_jobs import upload
from onnx_models import model, node
from rigorous_problems import linear, subject
from verify_jobs import context

from service.bounds.methods import CROWN
from service.formats.vnnlib import Query, parse, rounded_down, rounded_up
from service.formats.vnnlib.terms import MOST_DIGITS
from service.jobs.files import DataLayout
from service.jobs.spec.verify import VerifySpec
from service.verification import job
from service.verification.bab.driver import decide
from service.verification.bab.model import ModelUnderVerification
from service.verification.verdict import Verdict

IDENTITY = model([node("Identity", ["x"])], [1, 1])
DECLARED = "(declare-const X_0 Real)(declare-const Y_0 Real)"


def text_of(value: Fraction) -> str:
    """Return a decimal that says just this number, whose denominator has no other factors than 2 and 5."""
    places = 0
    while (value * 10**places).denominator != 1:
        places += 1
    return _decimal(int(value * 10**places), -places)


def _decimal(digits: int, exponent: int) -> str:
    """Return ``digits · 10^exponent``, as a sum where it has more digits than one number of a property may have."""
    if abs(digits) >= 10**MOST_DIGITS:
        high, low = divmod(digits, 10 ** (MOST_DIGITS - 1))
        return f"(+ {_decimal(high, exponent + MOST_DIGITS - 1)} {_decimal(low, exponent)})"
    return f"{digits}e{exponent}" if exponent else str(digits)


decimals = st.builds(
    lambda digits, exponent: Fraction(digits) * Fraction(10) ** exponent,
    st.integers(-(10**18), 10**18),
    st.one_of(st.integers(-20, 5), st.integers(-300, 300)),
)


@st.composite
def written(draw: st.DrawFn, value: Fraction, depth: int = 2) -> str:
    """The number as arithmetic that floats would round."""
    if not depth:
        return text_of(value)
    form = draw(st.sampled_from(["plain", "shifted", "scaled", "negated", "split"]))
    if form == "shifted":
        by = draw(decimals)
        inner, other = draw(written(value + by, depth - 1)), draw(written(by, depth - 1))
        return f"(- {inner} {other})"
    if form == "scaled":
        power = draw(st.integers(-300, 300))
        return f"(* {text_of(Fraction(10) ** power)} {draw(written(value / Fraction(10) ** power, depth - 1))})"
    if form == "negated":
        return f"(- {draw(written(-value, depth - 1))})"
    if form == "split":
        by = draw(decimals)
        return f"(+ {draw(written(by, depth - 1))} {text_of(value - by)} 0)"
    return text_of(value)


@given(st.data())
def test_arithmetic_of_constants_is_exact(data: st.DataObject) -> None:
    threshold, factor = data.draw(decimals), data.draw(decimals)
    assume(factor != 0)
    shown, times = data.draw(written(threshold)), data.draw(written(factor))
    box = "(assert (<= X_0 1))(assert (>= X_0 0))"
    (case,) = parse(f"{DECLARED}{box}(assert (<= (* {times} Y_0) {shown}))").disjuncts
    ((coefficients, exact),) = [(each.coefficients, each.threshold) for each in case.halfspaces]
    assert coefficients == ((0, factor),)
    assert exact == threshold


@given(decimals)
def test_ends_are_rounded_to_the_next_float(value: Fraction) -> None:
    below, above = rounded_down(value), rounded_up(value)
    assert below == -inf or Fraction(below) <= value
    assert above == inf or value <= Fraction(above)
    assert below == above or nextafter(below, inf) == above


PERMUTING = ([[1.0, 0.0], [0.0, 1.0]], [[0.0, -1.0], [1.0, 0.0]], [[1.0, 0.0], [-1.0, 0.0]])
SUMMING = ([[2.0, -3.0], [1.0, 1.0]], [[0.1, 0.3], [-7.0, 0.2]])
KINDS = {
    "float32": (torch.float32, False, PERMUTING),
    "float64": (torch.float64, False, PERMUTING),
    "rigorous": (torch.float64, True, (*PERMUTING, *SUMMING)),
}
"""Types, whether rigorous, and weights; those of plain searches are such that float64 computes outputs exactly."""
STARTS = [Fraction(each) for each in ("0", "0.1", "-0.3", "1e17", "100000000000000000.6", "-7e-17", "1e-320", "12345")]
WIDTHS = [Fraction(each) for each in ("0", "1e-20", "0.5", "3", "1e15")]
FACTORS = [Fraction(each) for each in ("0", "1", "-1", "-0.1", "3e-210", "1.0000000000000000001", "-7e205")]
BEYOND = [
    Fraction(each)
    for each in ("0", "1e-400", "-1e-400", "1e-18", "-1e-18", "1e-9", "-1e-9", "0.3", "-0.3", "9", "1e16")
]


@dataclass(frozen=True)
class Asked:
    """A query about an affine network ``weight · x``, and whether it has a counterexample."""

    query: Query
    is_reachable: bool


@st.composite
def queries(draw: st.DrawFn, weight: list[list[float]]) -> Asked:
    """Two disjuncts, each a combination of outputs whose threshold is near its exact minimum over the box."""
    lower = [draw(st.sampled_from(STARTS)) for _ in range(2)]
    upper = [low + draw(st.sampled_from(WIDTHS)) for low in lower]
    text, is_reachable = [], False
    for index, (low, high) in enumerate(zip(lower, upper, strict=True)):
        text.append(f"(assert (and (>= X_{index} {draw(written(low, 1))}) (<= X_{index} {draw(written(high, 1))})))")
    text.append("(assert (or")
    for _ in range(2):
        row = [draw(st.sampled_from(FACTORS)) for _ in range(2)]
        least = least_of(row, weight, lower, upper)
        beyond = Fraction(draw(st.sampled_from(BEYOND))) * max(abs(row[0]), abs(row[1]), Fraction(1, 10**300))
        terms = " ".join(f"(* {draw(written(factor, 1))} Y_{index})" for index, factor in enumerate(row))
        text.append(f"(<= (+ {terms}) {draw(written(least - beyond, 1))})")
        is_reachable = is_reachable or beyond <= 0
    declared = "".join(f"(declare-const {name} Real)" for name in ("X_0", "X_1", "Y_0", "Y_1"))
    return Asked(parse(f"{declared}{' '.join(text)}))"), is_reachable)


def least_of(
    row: Sequence[Fraction], weight: list[list[float]], lower: Sequence[Fraction], upper: Sequence[Fraction]
) -> Fraction:
    """Of ``row · weight · x`` over the box."""
    slopes = [
        sum((factor * Fraction(w) for factor, w in zip(row, column, strict=True)), Fraction(0))
        for column in zip(*weight, strict=True)
    ]
    least = Fraction(0)
    for slope, low, high in zip(slopes, lower, upper, strict=True):
        least += slope * (low if slope > 0 else high)
    return least


@cache
def affine(kind: str, index: int) -> ModelUnderVerification:
    dtype, rigorous, weights = KINDS[kind]
    return subject(linear(weights[index]), 2, dtype, rigorous=rigorous)


@settings(max_examples=examples(4, 20), deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", slow_but_for(KINDS, "rigorous"))
def test_no_verdict_contradicts_the_exact_one(kind: str, data: st.DataObject) -> None:
    _, _, weights = KINDS[kind]
    index = data.draw(st.integers(0, len(weights) - 1))
    asked = data.draw(queries(weights[index]))
    if not asked.query.disjuncts:  # its conditions on the input exclude each other: verified without a search
        assert not asked.is_reachable
        return
    decision = decide(affine(kind, index), asked.query, CROWN, 0.2, restarts=2)
    assert decision.verdict is not (Verdict.VERIFIED if asked.is_reachable else Verdict.FALSIFIED)


def decided(tmp_path: Path, query: str, **fields: Any) -> dict[str, Any]:
    """The row of a verification job about ``y = x``."""
    data = DataLayout(tmp_path)
    given = {"model": {"onnx": upload(data, IDENTITY)}, "property": {"vnnlib": upload(data, query.encode())}, **fields}
    ranked, report = context(data)
    job.run(VerifySpec.model_validate({"device": "cpu", **given}), ranked)
    (row,) = report.bounds
    return dict(row)


@pytest.mark.parametrize("rigorous", [False, True])
def test_a_constant_that_floats_cancel_is_no_proof(tmp_path: Path, rigorous: bool) -> None:
    """``1e17 + 0.6 − 1e17`` is 0.6, and not 0."""
    box = "(assert (>= X_0 0.1))(assert (<= X_0 1))"
    row = decided(tmp_path, f"{DECLARED}{box}(assert (<= Y_0 (- (+ 1e17 0.6) 1e17)))", rigorous=rigorous)
    assert row["verdict"] == "falsified"
    assert Fraction(1, 10) <= Fraction(row["counterexample"][0]) <= Fraction(6, 10)


@pytest.mark.parametrize("rigorous", slow_but_for([False, True], False))
def test_a_constant_that_floats_lose_is_no_counterexample(tmp_path: Path, rigorous: bool) -> None:
    """``-1e-200 · 1e-200`` is less than every output of the box."""
    box = "(assert (>= X_0 0))(assert (<= X_0 1))"
    row = decided(tmp_path, f"{DECLARED}{box}(assert (<= Y_0 (* -1e-200 1e-200)))", rigorous=rigorous)
    assert row["verdict"] == "verified"
    row = decided(tmp_path, f"{DECLARED}{box}(assert (<= (* 1e-200 1e-200 Y_0) -1e-400))", rigorous=rigorous)
    assert row["verdict"] == "verified"


@pytest.mark.parametrize("method", slow_but_for(["crown", "beta-crown"], "beta-crown"))
@pytest.mark.parametrize("rigorous", [False, True])
@pytest.mark.parametrize(
    "numbers", first_fast(1, [[0.1, 1.0, 0.1], [0.3, 0.1, 0.1 * 0.3], [0.10000000074, 1.0, 0.1], [1e6, 0.1, 1e5]])
)
def test_a_box_that_is_one_point_is_not_falsified_by_another(
    tmp_path: Path, method: str, rigorous: bool, numbers: tuple[float, float, float]
) -> None:
    """``factor · x ≥ threshold`` holds at the point, but not at the nearest float32 or for the nearest threshold."""
    end, factor, threshold = numbers
    assert Fraction(factor) * Fraction(end) >= Fraction(threshold)
    output = {"coefficients": [factor], "threshold": threshold}
    asked = {"box": {"lower": [end], "upper": [end], "output": [output]}}
    fields = {"property": asked, "method": method, "rigorous": rigorous, "budget": {"seconds": 1.0}}
    assert decided(tmp_path, "", **fields)["verdict"] in ("verified", "unknown", "timeout")


@pytest.mark.parametrize("kind", KINDS)
def test_coefficients_that_a_type_rounds_prove_no_more_than_the_exact_ones(kind: str) -> None:
    """``Y_0 − 1.00000001 · Y_1`` is −0.01 at the box's only input, and 0 with a coefficient of float32."""
    box = "".join(f"(declare-const {name} Real)" for name in ("X_0", "X_1", "Y_0", "Y_1"))
    box += "".join(f"(assert (and (<= X_{index} 1000000) (>= X_{index} 1000000)))" for index in range(2))
    query = parse(f"{box}(assert (<= (- Y_0 (* 1.00000001 Y_1)) -0.005))")
    decision = decide(affine(kind, 0), query, CROWN, 0.5, restarts=0)
    assert decision.verdict is not Verdict.VERIFIED


def test_what_is_verified_of_a_long_coefficient_allows_for_its_rounding() -> None:
    """No float64 is as near as the threshold to these coefficients, whose sum is 1."""
    box = "".join(f"(declare-const {name} Real)" for name in ("X_0", "X_1", "Y_0", "Y_1"))
    box += "".join(f"(assert (and (<= X_{index} 1e20) (>= X_{index} 1e20)))" for index in range(2))
    combined = "(+ (* 0.1234567890123456789 Y_0) (* 0.8765432109876543211 Y_1))"
    for kind in KINDS:
        below, far = (parse(f"{box}(assert (<= {combined} {end}))") for end in ("100000000000000000000", "1e19"))
        assert decide(affine(kind, 0), below, CROWN, 0.5, restarts=0).verdict is not Verdict.VERIFIED
        assert decide(affine(kind, 0), far, CROWN, 20.0, restarts=0).verdict is Verdict.VERIFIED
