"""VNN-LIB 1: what texts mean, and what is wrong with others; deciding queries on small networks."""

from __future__ import annotations

import random
import re
from fractions import Fraction
from math import inf, nextafter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import examples, slow_but_for
from onnx_models import dense, model, node

from service.bounds.methods import CROWN, IBP
from service.formats.vnnlib import Halfspace, Query, VnnlibError, contradict, parse
from service.verification.bab.driver import decide
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.specification import specifications
from service.verification.verdict import Verdict

DECLARED = "\n".join(f"(declare-const {name} Real)" for name in ("X_0", "X_1", "Y_0", "Y_1"))
BOX = "(assert (<= X_0 1)) (assert (>= X_0 -1.5e0))\n(assert (and (<= X_1 0.5) (<= 0 X_1))) ; a comment"


def query(text: str) -> Query:
    return parse(f"{DECLARED}\n{BOX}\n{text}")


def test_a_conjunction_is_one_case() -> None:
    read = query("(assert (<= Y_0 Y_1))\n(assert (>= Y_1 3))")
    (case,) = read.disjuncts
    assert (read.inputs, read.outputs) == (2, 2)
    assert (case.lower, case.upper) == ((-1.5, 0.0), (1.0, 0.5))
    assert case.halfspaces == (Halfspace(((0, 1.0), (1, -1.0)), 0.0), Halfspace(((1, -1.0),), -3.0))


def test_disjunctions_multiply() -> None:
    read = query("(assert (or (<= X_0 0) (and (>= X_0 0.5))))\n(assert (or (<= Y_0 1) (<= Y_1 1) (and)))")
    assert [(case.lower[0], case.upper[0]) for case in read.disjuncts] == [(-1.5, 0.0)] * 3 + [(0.5, 1.0)] * 3
    assert [len(case.halfspaces) for case in read.disjuncts] == [1, 1, 0] * 2


def test_a_variable_may_be_declared_as_a_function_without_arguments() -> None:
    text = f"{DECLARED}\n{BOX}\n(assert (<= Y_0 Y_1))"
    assert parse(re.sub(r"\(declare-const (\w+) Real\)", r"(declare-fun \1 () Real)", text)) == parse(text)


def test_boxes_may_stand_in_the_disjunction_alone() -> None:
    read = parse(f"{DECLARED}(assert (or (and (>= X_0 0) (<= X_0 1) (>= X_1 0) (<= X_1 1) (>= Y_0 1))))")
    assert read.disjuncts[0].upper == (1.0, 1.0)


def test_an_empty_box_is_no_case() -> None:
    assert query("(assert (>= X_0 1.5)) (assert (<= Y_0 0))").disjuncts == ()
    assert query("(assert (<= 1 0))").disjuncts == ()
    assert query("(assert (or))").disjuncts == ()


def test_sums_and_products() -> None:
    read = query("(assert (<= (+ Y_0 (* 2 Y_1) (- 1)) (- (* Y_0 -1 3) Y_1 4)))")
    assert read.disjuncts[0].halfspaces == (Halfspace(((0, 4.0), (1, 3.0)), -3.0),)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("(assert (>= 1 Y_0 Y_1))", "(assert (<= Y_1 Y_0)) (assert (<= Y_0 1))"),
        ("(assert (= Y_0 1 Y_1))", "(assert (<= Y_0 1)) (assert (>= Y_0 1)) (assert (<= 1 Y_1)) (assert (<= Y_1 1))"),
        ("(assert (not (<= Y_0 1)))", "(assert (> Y_0 1))"),
        ("(assert (not (= Y_0 1)))", "(assert (or (< Y_0 1) (< 1 Y_0)))"),
        ("(assert (not (and (< Y_0 1) (>= Y_1 2))))", "(assert (or (<= 1 Y_0) (< Y_1 2)))"),
        ("(assert (not (or (< Y_0 1) (not (<= Y_1 2)))))", "(assert (<= 1 Y_0)) (assert (<= Y_1 2))"),
        ("(assert (=> (<= Y_0 1) (< Y_1 2) (> Y_1 3)))", "(assert (or (< 1 Y_0) (<= 2 Y_1) (< 3 Y_1)))"),
        ("(assert (not (=> (<= Y_0 1) (< Y_1 2))))", "(assert (<= Y_0 1)) (assert (>= Y_1 2))"),
        ("(assert (<= Y_0 (/ Y_1 -2 2)))", "(assert (<= Y_0 (* -0.25 Y_1)))"),
        ("(set-logic QF_LRA) (assert (<= Y_0 1)) (check-sat) (get-model) (exit)", "(assert (<= Y_0 1))"),
    ],
)
def test_formulas_are_those_of_smt_lib(text: str, same: str) -> None:
    assert query(text) == query(same)


def test_a_strict_comparison_leaves_out_its_end() -> None:
    (case,) = query("(assert (< Y_0 1)) (assert (> X_0 -1.5)) (assert (< X_1 0.5)) (assert (<= X_1 0.25))").disjuncts
    assert case.halfspaces == (Halfspace(((0, 1.0),), 1.0, strict=True),)
    assert (case.open_lower, case.open_upper) == ({0}, set())
    assert query("(assert (> X_0 1))").disjuncts == ()
    assert query("(assert (< 1 1))").disjuncts == ()
    (only,) = specifications(query("(assert (> X_0 -1.5)) (assert (<= Y_0 1))"), torch.device("cpu"))
    assert float(only.first[0]) == nextafter(-1.5, inf)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        pytest.param("(assert (<= Y_0 0))", Verdict.FALSIFIED, marks=pytest.mark.slow),
        ("(assert (< Y_0 0))", Verdict.UNKNOWN),  # 0 is its least
        ("(assert (> X_0 0)) (assert (<= Y_0 0))", Verdict.UNKNOWN),  # as near as any number, and never there
    ],
)
def test_an_end_that_is_left_out_is_no_counterexample(text: str, verdict: Verdict) -> None:
    subject = ModelUnderVerification.of(model([node("Relu", ["x"])], [1, 1]), torch.float64)
    declared = "(declare-const X_0 Real) (declare-const Y_0 Real) (assert (<= 0 X_0 1))"
    assert decide(subject, parse(f"{declared} {text}"), CROWN, 0.5).verdict is verdict


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(assert (<= Y_0 Z))", "line 7: got 'Z', expected a number, X_i or Y_i"),
        ("\n(assert (<= Y_2 0))", "line 8: got 'Y_2', expected a variable that is declared"),
        ("(assert (xor Y_0 0))", "line 7: got 'xor', expected and, or, not, => or one of <= < >= > ="),
        ("(assert (not (<= Y_0 0) (<= Y_1 0)))", "line 7: got 'not', expected one formula, not 2,"),
        ("(assert (=> (<= Y_0 0)))", "line 7: got '=>', expected two formulas, not 1,"),
        ("(assert (<= (/ 1 Y_0) 0))", "line 7: got '/', expected a quotient by numbers other than 0"),
        ("(assert (<= (/ Y_0 0) 0))", "line 7: got '/', expected a quotient by numbers other than 0"),
        ("(assert (<= Y_0 0)", "line 7: got '(' that nothing closes"),
        ("(assert (<= Y_0 0)))", "line 7: got ')'"),
        ("(assert (<= (+ X_0 Y_1) 0))", "line 7: got '<=', expected inputs and outputs in comparisons of their own"),
        ("(assert (<= (* Y_0 Y_1) 0))", "line 7: got '*', expected a product with at most one variable"),
        ("(assert (<= Y_0))", "expected two sides, not 1"),
        ("(assert (()))", "line 7: got 'assert', expected (and …)"),
        ("(push 1)", "line 7: got 'push', expected declare-const, declare-fun or assert"),
        ("(declare-const Z Real)", "line 7: got 'Z', expected a name X_i or Y_i"),
        ("(declare-const Y_2 Int)", "line 7: got 'Int', expected Real"),
        ("(declare-const Y_2)", "line 7: got 'Y_2', expected Real"),
        ("(declare-const Y_2 () Real)", "line 7: got 'declare-const', expected Real, the sort of Y_2"),
        ("(declare-const Y_2 Real Real)", "line 7: got 'Real', expected nothing after Real"),
        (
            "(declare-fun Y_2 (Int) Real)",
            "line 7: got 'Int', expected () after Y_2, since a variable takes no arguments",
        ),
        ("(declare-fun Y_2 (()) Real)", "line 7: got 'Real', expected () after Y_2"),
        ("(declare-fun Y_2 Real)", "line 7: got 'Real', expected () after Y_2"),
        ("(declare-fun Y_2 () Int)", "line 7: got 'Int', expected Real"),
        ("(declare-fun Y_2 ())", "line 7: got 'Y_2', expected Real"),
        ("(declare-const X_3 Real)", "X_2 is not declared"),
        ("(declare-const X_2 Real)", "X_2 has no lower bound"),
        ("word", "line 7: got 'word', expected '('"),
    ],
)
def test_errors_name_line_and_token(text: str, message: str) -> None:
    with pytest.raises(VnnlibError) as refused:
        query(text + "\n")
    assert message in str(refused.value)


def test_too_many_cases_are_refused() -> None:
    with pytest.raises(VnnlibError, match="multiply to 1048576 cases"):
        query("(assert (or (<= Y_0 0) (<= Y_1 0)))" * 20)


@pytest.mark.parametrize("number", ["inf", "-inf", "nan", "1e", "0x10", "1_000", "٣", "1e1001", "1e-999999999"])
def test_what_is_no_finite_number_is_refused_by_place(number: str) -> None:
    for text in (f"(assert (<= Y_0 {number}))", f"(assert (<= X_0 {number}))", f"(assert (<= (* {number} Y_0) 0))"):
        with pytest.raises(VnnlibError, match=f"line 7: got '{number}', expected a number"):
            query(f"\n{text}".lstrip())


def test_a_product_that_grows_is_refused_before_it_is_made() -> None:
    many = " ".join(["1e1000"] * 5_000)
    with pytest.raises(VnnlibError, match="line 7: got '\\*', expected a product of at most 32768 bits"):
        query(f"(assert (<= (* {many} Y_0) 0))")


def test_products_within_products_are_multiplied_once() -> None:
    text = "(* 2 " * 90 + "Y_0" + ")" * 90
    assert query(f"(assert (<= {text} 0))").disjuncts[0].halfspaces[0].coefficients == ((0, 2**90),)


@pytest.mark.slow
@pytest.mark.parametrize("nested", slow_but_for([True, False], True))
def test_formulas_are_refused_by_size_before_they_are_multiplied_out(nested: bool) -> None:
    """2^10 cases of 3,000 comparisons each, and numbers of cases that no text could show."""
    either = "(or (<= Y_0 0) (<= Y_1 0))"
    common = " ".join(["(<= Y_0 1)"] * 3_000)
    few = either * 10 + f"(or (and {common}) (<= Y_1 1))"
    with pytest.raises(VnnlibError, match="multiply to more than 2000000 comparisons"):
        query(f"(assert (and {few}))" if nested else "".join(f"(assert {each})" for each in few_parts(few)))
    many = either * 5_000
    with pytest.raises(VnnlibError, match="multiply to very many cases"):
        query(f"(assert (and {many}))" if nested else f"(assert {either})" * 5_000)


def few_parts(text: str) -> list[str]:
    """Formulas that stand one after the other."""
    parts, depth, start = [], 0, 0
    for place, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if not depth:
            parts.append(text[start : place + 1])
            start = place + 1
    return parts


@pytest.fixture(scope="module")
def network() -> ModelUnderVerification:
    return ModelUnderVerification.of(dense([2, 12, 12, 2]), torch.float64)


def extremes(subject: ModelUnderVerification) -> tuple[float, float]:
    """Of ``y0 − y1`` on a fine grid of the box."""
    first, second = torch.meshgrid(torch.linspace(-1, 1, 401), torch.linspace(-1, 1, 401), indexing="ij")
    outputs = subject.float64_module(torch.stack([first.flatten(), second.flatten()], dim=1).double())
    difference = outputs[:, 0] - outputs[:, 1]
    return float(difference.min()), float(difference.max())


@settings(max_examples=examples(3, 10), deadline=None)
@given(share=st.sampled_from([-0.2, -0.02, -0.01, 0.005, 0.02, 0.3]), above=st.booleans())
def test_small_networks_are_always_decided(network: ModelUnderVerification, share: float, above: bool) -> None:
    least, most = extremes(network)
    size = most - least
    reached = share > 0
    threshold = most - share * size if above else least + share * size
    asked = f"(>= (- Y_0 Y_1) {threshold})" if above else f"(<= (- Y_0 Y_1) {threshold})"
    box = "".join(f"(assert (<= X_{index} 1))(assert (>= X_{index} -1))" for index in (0, 1))
    decision = decide(network, parse(f"{DECLARED}{box}(assert (or (and {asked}) (>= Y_0 1e9)))"), CROWN, 30.0)
    assert decision.verdict is (Verdict.FALSIFIED if reached else Verdict.VERIFIED)
    if decision.counterexample is not None:
        outputs = network.float64_module(torch.tensor([decision.counterexample], dtype=torch.float64))[0]
        difference = float(outputs[0] - outputs[1])
        assert difference >= threshold if above else difference <= threshold


def test_a_conjunction_needs_all_of_its_halfspaces_at_one_input() -> None:
    """Each half is reached in the box, both together nowhere."""
    subject = ModelUnderVerification.of(
        model([node("Neg", ["x"], "n"), node("Concat", ["x", "n"], axis=1)], [1, 1]), torch.float64
    )
    declared = "".join(f"(declare-const {name} Real)" for name in ("X_0", "Y_0", "Y_1"))
    text = f"{declared}(assert (<= -1 X_0))(assert (<= X_0 1))"
    both = decide(subject, parse(f"{text}(assert (>= Y_0 0.1))(assert (>= Y_1 0.1))"), CROWN, 20.0)
    one = decide(subject, parse(f"{text}(assert (or (>= Y_0 0.1) (>= Y_1 0.1)))"), CROWN, 20.0)
    assert (both.verdict, one.verdict) == (Verdict.VERIFIED, Verdict.FALSIFIED)


def test_no_time_is_no_verdict(network: ModelUnderVerification) -> None:
    least, _ = extremes(network)
    box = "".join(f"(assert (<= X_{index} 1))(assert (>= X_{index} -1))" for index in (0, 1))
    asked = parse(f"{DECLARED}{box}(assert (<= (- Y_0 Y_1) {least - 0.02}))")
    assert decide(network, asked, IBP, 0.0).verdict is Verdict.UNKNOWN


def test_a_query_without_cases_is_not_decided(network: ModelUnderVerification) -> None:
    with pytest.raises(ValueError, match=r"query\.disjuncts: got none, expected one or more"):
        decide(network, query("(assert (<= 1 0))"), CROWN, 1.0)


@pytest.mark.parametrize(("factor", "end"), [("3.0", "0.1"), ("-3.0", "0.1"), ("7.0", "1e-300"), ("0.1", "0.3")])
def test_an_end_is_exact_and_its_box_is_rounded_outwards(factor: str, end: str) -> None:
    """``factor · x ≤ end`` over the rational numbers: no input that satisfies it is left out."""
    text = f"(declare-const X_0 Real)(declare-const Y_0 Real)(assert (<= (* {factor} X_0) {end}))(assert (<= Y_0 0))"
    is_upper = Fraction(factor) > 0
    free = f"(assert ({'>=' if is_upper else '<='} X_0 {-1e6 if is_upper else 1e6}))"
    asked = parse(text + free)
    exact = Fraction(end) / Fraction(factor)
    assert (asked.disjuncts[0].upper if is_upper else asked.disjuncts[0].lower) == (exact,)
    (specification,) = specifications(asked, torch.device("cpu"))
    if is_upper:
        assert Fraction(nextafter(float(specification.upper), -inf)) < exact <= Fraction(float(specification.upper))
        assert Fraction(float(specification.last)) <= exact
    else:
        assert Fraction(float(specification.lower)) <= exact < Fraction(nextafter(float(specification.lower), inf))
        assert exact <= Fraction(float(specification.first))


def test_an_end_beyond_all_numbers_is_refused() -> None:
    text = "(declare-const X_0 Real)(declare-const Y_0 Real)(assert (<= (* 1e-300 X_0) 1e300))(assert (<= Y_0 0))"
    with pytest.raises(VnnlibError, match="a bound on X_0 that is no larger than a float64 can be"):
        parse(text)


@settings(max_examples=examples(30, 300), deadline=None)
@given(
    head=st.sampled_from(["<=", "<", ">=", ">"]),
    one=st.sampled_from(["X_0", "X_1", "Y_0", "Y_1"]),
    other=st.sampled_from(["0.25", "-1.5e-1", "+3", "1.", "X_0", "Y_0", "Y_1"]),
    form=st.sampled_from(["{}", "(not {})", "(or {} (and))", "(=> {} (>= Y_1 2))", "(and {} {})"]),
)
def test_a_comparison_that_is_read_as_one_token_means_what_its_parts_mean(
    head: str, one: str, other: str, form: str
) -> None:
    """A line between the parts, or a sum of one term, takes the general way."""

    def read(comparison: str) -> Query | str:
        try:
            return query(f"(assert {form.replace('{}', comparison)})")
        except VnnlibError as error:
            return str(error)

    plain = read(f"({head} {one} {other})")
    assert plain == read(f"({head} (+ {one}) {other})")
    assert isinstance(plain, str) or plain == read(f"({head} {one}\n{other})")


@pytest.mark.parametrize(
    ("conditions", "whether"),
    [
        ("(> Y_0 Y_1) (> Y_1 Y_0)", True),
        ("(>= Y_0 Y_1) (>= Y_1 Y_0)", False),
        ("(>= Y_0 Y_1) (> Y_1 Y_0)", True),
        ("(>= Y_0 1) (<= Y_0 1)", False),
        ("(>= Y_0 1) (< Y_0 1)", True),
        ("(<= (+ Y_0 Y_1) 1) (>= Y_0 0.5) (>= Y_1 0.5)", False),
        ("(<= (+ Y_0 Y_1) 1) (>= Y_0 0.5) (> Y_1 0.5)", True),
        ("(<= (* 3 Y_0) (* 2 Y_1)) (<= Y_1 Y_0) (>= Y_0 0.001)", True),
        ("(<= (* 3 Y_0) (* 2 Y_1)) (<= Y_1 Y_0) (<= Y_0 -0.001)", False),
    ],
)
def test_conditions_that_no_outputs_satisfy_contradict_each_other(conditions: str, whether: bool) -> None:
    (case,) = query(f"(assert (and {conditions}))").disjuncts
    assert contradict(case.halfspaces) is whether


@settings(max_examples=examples(20, 300), deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(2, 7))
def test_halfspaces_with_a_common_point_never_contradict(seed: int, count: int) -> None:
    draw = random.Random(seed)
    point = [draw.randint(-3, 3) for _ in range(3)]
    found = []
    for _ in range(count):
        factors = [draw.randint(-2, 2) for _ in range(3)]
        at = sum(factor * x for factor, x in zip(factors, point, strict=True))
        slack = draw.choice([0, 0, 1])
        found.append(Halfspace(tuple(enumerate(map(float, factors))), float(at + slack), strict=slack > 0))
    assert not contradict(found)
