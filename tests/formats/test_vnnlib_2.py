"""VNN-LIB 2.0: what its files mean, and what is wrong with others, by line and column."""

from __future__ import annotations

import random

import pytest
from uploaded_queries import query as version_1
from uploaded_queries import refusal

from service.formats.vnnlib import Halfspace, VnnlibError, parse, parse_networks, written

VERSION = "(vnnlib-version <2.0>)\n"
PLAIN = f"{VERSION}(declare-network f\n (declare-input X float32 [1,2])\n (declare-output Y Real[2, 1]))\n"
BOX = "(assert (and (<= X[0,0] 1) (>= X[0, 0] -1.5e0) (<= 0 X[0,1] 0.5))) ; a comment\n"
PAIR = f"""{VERSION}(declare-network f
 (declare-input A real [2]) (declare-input B real [])
 (declare-hidden H real [2] "h") (declare-output C real [1]))
(declare-network g (equal-to f)
 (declare-input D real [2]) (declare-input E real [])
 (declare-output F real [1]))
(assert (and (<= A[0] 1) (>= A[0] 0) (<= A[1] 1) (>= A[1] 0) (== B 0.5) (== D[0] A[0]) (>= D[1] A[1]) (<= D[1] 2)
 (== E B)))
"""


def test_one_network_is_the_same_data_as_in_version_1() -> None:
    first = version_1(2, 2, "(assert (or (<= Y_0 Y_1) (and (> (+ Y_0 (* -2 Y_1)) 3) (<= X_0 0))))")
    box = "(assert (and (<= X[0,0] 1) (>= X[0,0] 0) (<= X[0,1] 1) (>= X[0,1] 0)))"
    second = f"{PLAIN}{box}(assert (or (<= Y[0,0] Y[1,0]) (and (> (+ Y[0,0] (* -2 Y[1,0])) 3) (<= X[0,0] 0))))"
    assert parse(second) == parse(first)
    assert parse(f"{PLAIN}{BOX}(assert (!= Y[1,0] 1))") == parse(f"{PLAIN}{BOX}(assert (or (< Y[1,0] 1) (> Y[1,0] 1)))")


@pytest.mark.parametrize(
    "text", [version_1(rest="; Y\n(assert (<= Y_0 0))"), f"; f\n{PLAIN}{BOX}(assert (< Y[0,0] 1))"]
)
def test_a_comment_ends_with_its_line_however_lines_end(text: str) -> None:
    assert parse(text.replace("\n", "\r")) == parse(text.replace("\n", "\r\n")) == parse(text)


def test_networks_lie_side_by_side() -> None:
    read = parse_networks(f"{PAIR}(assert (> (+ H[1] C[0]) (* 2 F[0])))")
    (case,) = read.query.disjuncts
    assert (read.query.inputs, read.query.outputs) == (6, 4)
    assert (case.lower, case.upper) == ((0, 0, 0.5, 0, 0, 0.5), (1, 1, 0.5, 1, 2, 0.5))
    assert case.halfspaces == (Halfspace(((3, 2), (1, -1), (2, -1)), 0, strict=True),)
    assert [each.relation for each in read.networks] == [None, "equal-to"]
    assert [each.value for each in read.networks[0].having("hidden")] == ["h"]


def test_inputs_that_are_compared_with_outputs_are_outputs_too() -> None:
    read = parse_networks(f"{PAIR}(assert (<= H[0] (+ D[1] 0.5)))")
    assert (read.compares_inputs, read.query.outputs) == (True, 4 + 6)
    assert read.query.disjuncts[0].halfspaces == (Halfspace(((0, 1), (4 + 4, -1)), 0.5),)


def test_a_written_query_reads_as_the_same() -> None:
    read = parse_networks(f"{PAIR}(assert (or (< (* 0.1 H[0]) F[0]) (and (> A[0] 0.3) (<= C[0] (* 3 D[1])))))").query
    assert parse(written(read)) == read


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{PLAIN}{BOX}(assert (<= Y[2,0] 0))", "line 6, column 9: got 'Y[2,0]', expected 2 places within [2,1]"),
        (
            f"{PLAIN}{BOX}(assert (!= Y[0,0] 0 1))",
            "line 6, column 10: got '!=', expected two sides, not 3, as what more",
        ),
        (f"{PLAIN}{BOX}(assert (<= 0 Y[1]))", "line 6, column 15: got 'Y[1]', expected 2 places within [2,1]"),
        (f"{PLAIN}{BOX}(assert\n (<= (+ Z[0] 1) 0))", "line 7, column 9: got 'Z[0]', expected a variable"),
        (f"{PLAIN}{BOX}(assert (<= (* Y[0,0] Y[1,0]) 0))", "line 6, column 14: got '*', expected a product"),
        (f"{PLAIN}(assert (<= X[0,0] 1))", "line 3: X[0,0] has no lower bound"),
        (f"{PLAIN}{BOX}(assert (<= Y[0,0] 0)", "line 6, column 1: got '(' that nothing closes"),
        (f"{PLAIN}{BOX}{PLAIN}", "line 6, column 2: got 'vnnlib-version', expected a network"),
        ("(vnnlib-version <2.1>)", "line 1, column 17: got '<2.1>', expected <2.0>"),
        (f"{VERSION}(assert (<= 0 1))", "line 2, column 2: got 'assert', expected a network"),
        (
            PLAIN.replace("float32", "int64"),
            "an input of real or floating-point numbers: one of int64 is not supported",
        ),
        (PLAIN.replace("float32", "text"), "line 3, column 19: got 'text [1,2]', expected real"),
        (PLAIN.replace("[1,2]", "[1,0]"), "expected a shape such as [1,5]"),
        (PLAIN.replace("[1,2]", "[99999,99999]"), "expected a shape of at most 16777216 entries"),
        (PLAIN.replace("[1,2]", '[1,2] "x"'), "got '\"x\"', expected ')': options of a tensor are not supported"),
        (PLAIN.replace("Y", "X"), "line 4, column 18: got 'X', expected a tensor of a name that is not declared"),
        (PLAIN.replace("declare-output", "declare-hidden"), 'expected the "name" of Y in the ONNX file'),
        (PLAIN.replace("input", "output"), "one (declare-input …) and one (declare-output …) at least in f"),
        (PAIR.replace("equal-to f", "equal-to h"), "line 5, column 30: got 'h', expected the name of a network"),
        (PAIR.replace("D real [2]", "D real [3]"), "inputs and outputs of g in the shapes and types of f"),
        (
            PAIR.replace('(declare-hidden H real [2] "h") (d', "(d").replace(
                "C real [1]", "C real [1]) (declare-input Z real []"
            ),
            "inputs, hidden values and outputs in this order",
        ),
    ],
)
def test_errors_name_line_column_and_token(text: str, message: str) -> None:
    with pytest.raises(VnnlibError) as refused:
        parse_networks(text)
    assert str(refused.value).startswith("line ")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PAIR, "line 5: got a network 'g' beside another"),
        (PAIR[: PAIR.index("(declare-network g")] + "(assert (== 1 1))", "line 3: got the input 'B' beside others"),
        (f"{PLAIN}{BOX}(assert (<= X[0,0] Y[0,0]))", "line 1: got a comparison of inputs with outputs"),
    ],
)
def test_a_job_takes_one_network_as_it_is(text: str, message: str) -> None:
    if "(assert (== 1 1))" in text:
        text += "(assert (and (== A[0] 0) (== A[1] 0) (== B 0)))"
    with pytest.raises(VnnlibError) as refused:
        parse(text)
    assert message in str(refused.value)
    assert "trivet vnnlib verify" in str(refused.value)


def test_damaged_files_are_read_or_refused_with_their_line() -> None:
    draw, words = random.Random(2), [*"()[]<", '"h', "A", "H[9]", "==", "declare-input", "real [1", "-1e", "<2.0>", ""]
    tokens = f"{PAIR}(assert (> (+ H[1] C[0]) (* 2 F[0])))".replace("(", " ( ").replace(")", " ) ").split(" ")
    for _ in range(300):
        damaged = list(tokens)
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(damaged))
            damaged[place : place + draw.randint(0, 2)] = draw.choices(words, k=draw.randint(0, 2))
        said = refusal(parse_networks, " ".join(damaged))
        assert not said or said.startswith("line ")
        assert len(said) < 300


def test_a_large_tensor_takes_no_memory_before_it_is_read() -> None:
    read = parse(PLAIN.replace("Real[2, 1]", "real [4096,4096]") + BOX + "(assert (<= Y[4095,4095] 0))")
    assert read.disjuncts[0].halfspaces[0].coefficients == ((2**24 - 1, 1),)
