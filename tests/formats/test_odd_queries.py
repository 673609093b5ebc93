"""Damaged queries and lists of instances: each is read or refused in words, with its line."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lanes import examples
from uploaded_queries import MODEL, PAIRED, PAIRS, SECOND, network, problems, query, refusal, zipped

from service.formats.vnnlib import VnnlibError, bundle, parse, sources

WORDS = [
    "(",
    ")",
    "assert",
    "declare-const",
    "and",
    "or",
    "not",
    "=>",
    "<=",
    ">=",
    "<",
    "=",
    "/",
    "+",
    "-",
    "*",
    "X_0",
    "X_99",
    "Y_0",
    "Y_1",
    "Real",
]
NUMBERS = ["0", "-1.5e3", "1e308", "1e-400", "inf", "nan", "1e99999", "0x1", "9" * 1001, "١", ";", "\ud800", "\x00"]
TEXT = query(2, 2, "(assert (or (and (<= (- Y_0 Y_1) 0.5) (>= (* 2 Y_1) 1)) (<= Y_0 (+ 1 2))))")


@settings(max_examples=examples(100, 300), deadline=None)
@given(data=st.data())
def test_a_damaged_query_is_read_or_refused_with_its_line(data: st.DataObject) -> None:
    tokens = TEXT.replace("(", " ( ").replace(")", " ) ").split(" ")
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(tokens) - 1))
        tokens[place : place + data.draw(st.integers(0, 2))] = data.draw(
            st.lists(st.sampled_from([*WORDS, *NUMBERS]), max_size=3)
        )
    said = refusal(parse, " ".join(tokens))
    assert not said or said.startswith("line ")
    assert len(said) < 300


@pytest.mark.slow
@settings(max_examples=examples(40, 200), deadline=None)
@given(st.text(max_size=200) | st.text("()XY_0 <=>+-*aorndset\n;1e", max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    said = refusal(parse, text)
    assert not said or said.startswith("line ")


@settings(max_examples=examples(60, 150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.one_of(st.text(max_size=80), st.text('a.onnx,q"\r\n5\x00', max_size=60)))
def test_any_list_of_instances_is_read_or_refused(tmp_path: Path, rows: str) -> None:
    path = tmp_path / "bundle.zip"
    path.write_bytes(zipped({**PAIRS, "instances.csv": rows.encode("utf-8", "surrogatepass")}))
    with suppress(VnnlibError), bundle(path) as opened:
        for pair in opened.pairs:
            opened.text(pair)
            opened.model(pair)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("a.onnx,q.vnnlib," + "9" * 200_000, "instances.csv line 1: field larger than field limit"),
        ('a.onnx,"q.vnnlib', "instances.csv line 1: unexpected end of data"),
        ('a.onnx,"q"vnnlib', "instances.csv line 1: ',' expected after '\"'"),
        ("a.onnx,q.vnnlib,1_0", "instances.csv line 1: got '1_0', expected seconds above 0"),
        ("a.onnx,q.vnnlib,1e400", "instances.csv line 1: got '1e400', expected seconds above 0"),
        ("a.onnx,q.vnnlib,nan", "instances.csv line 1: got 'nan', expected seconds above 0"),
        ("a.onnx," * 50_000, "instances.csv line 1: got 'a.onnx,a.onnx,"),
    ],
)
def test_a_list_that_is_no_csv_is_a_problem_of_its_field(tmp_path: Path, rows: str, words: str) -> None:
    (found,) = problems(tmp_path, {SECOND: zipped({**PAIRS, "instances.csv": rows})}, **PAIRED)
    assert found.path == "property.instances"
    assert found.message.startswith(words)
    assert len(found.message) < 400


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_archive_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    content = bytearray(zipped({**PAIRS, "instances.csv": "a.onnx,q.vnnlib\n"}))
    for _ in range(3):
        content[draw.randrange(len(content))] = draw.randrange(256)
    assert isinstance(problems(tmp_path, {SECOND: bytes(content)}, **PAIRED), list)
    path = tmp_path / "queries"
    path.write_bytes(bytes(content))
    with suppress(VnnlibError):
        for source in sources(path):
            parse(source.text)


def test_bounds_on_inputs_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    for end in ("inf", "-inf", "nan", "1e400"):
        files = {MODEL: network(), SECOND: query(rest=f"(assert (<= X_0 {end}))\n(assert (<= Y_0 0))")}
        (found,) = problems(tmp_path, files, property={"vnnlib": SECOND})
        assert found.message.startswith("line 8: got ")
