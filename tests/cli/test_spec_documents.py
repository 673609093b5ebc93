"""Specs are read by the rules of JSON and of YAML 1.2, and written so that either version of YAML reads the same."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from service.jobs.text import documents
from trivet.cli import specs
from trivet.errors import TrivetError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
AMBIGUOUS = st.sampled_from(["no", "on", "1e3", "0o7", "010", "1:30", "1_000", "2026-01-02", "~", ".inf", "true", "<<"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT | AMBIGUOUS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | AMBIGUOUS, inner, max_size=3),
    max_leaves=8,
)

LAUGHTER = ("a: &a0 [1]\n" + "".join(f"b{n}: &a{n} [{f'*a{n - 1},' * 9}]\n" for n in range(1, 9))).encode()
"""Some hundred bytes that stand for nine to the eighth values."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{country: no, on: off, y: n}", {"country": "no", "on": "off", "y": "n"}),
        ("[true, False, TRUE, yes]", [True, False, True, "yes"]),
        ("[1e0, 1e-3, .5, 1., -2.5E+3]", [1.0, 0.001, 0.5, 1.0, -2500.0]),
        ("[010, 0o10, 0x1F, 0b1, 1_000, 1:30]", [10, 8, 31, "0b1", "1_000", "1:30"]),
        ("[~, null, Null, '']", [None, None, None, ""]),
        ("[2026-01-02, 2026-01-02T03:04:05Z]", ["2026-01-02", "2026-01-02T03:04:05Z"]),
        ("[.inf, -.INF]", [float("inf"), float("-inf")]),
        ("a: &x {b: 1}\nc: {<<: *x, d: 2}", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
        ("steps:\t1\nname:\tx\t# why\n", {"steps": 1, "name": "x"}),
        ("{\n\ta: [1,\t2],\n\tb: c}", {"a": [1, 2], "b": "c"}),
        ('name: "train \\ud83d\\ude82"', {"name": "train 🚂"}),
    ],
)
def test_yaml_is_read_by_its_version_1_2(text: str, expected: Any) -> None:
    found = documents.parse(text)
    assert found == expected
    assert json.dumps(found) == json.dumps(expected)  # 1 is not True, nor 1.0


@settings(max_examples=40, deadline=None)
@given(value=VALUES, ascii_only=st.booleans(), indent=st.sampled_from([None, 2, "\t"]))
def test_all_json_is_read(value: Any, ascii_only: bool, indent: Any) -> None:
    text = json.dumps({"spec": value}, ensure_ascii=ascii_only, indent=indent)
    assert documents.parse(text) == {"spec": value}


@settings(max_examples=40, deadline=None)
@given(VALUES)
@example({"\x85": "\u2028", "a": "b\u2029\x85 c\n"})
def test_what_is_written_is_read_by_both_versions(value: Any) -> None:
    text = documents.dump({"spec": value})
    assert documents.parse_yaml(text) == yaml.safe_load(text) == {"spec": value}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("text", ['{"name": "ü 🚂"}', "name: ü 🚂\n"])
def test_a_byte_order_mark_says_how_a_file_is_written(tmp_path: Path, encoding: str, text: str) -> None:
    path = tmp_path / "spec"
    path.write_bytes(text.encode(encoding))
    assert specs.load(str(path)) == {"name": "ü 🚂"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"model:\n\tfamily: mlp\n", "indent YAML with spaces, not with a tab"),
        (b"name: \xff\n", "cannot read"),
        (codecs.BOM_UTF16_LE + b"a", "cannot read"),
        (b"[" * 5_000, "is nested too deeply"),
        (b"steps: &steps [1, *steps]", "has an alias that refers to a value around it"),
        (b"steps: 200\nseed: 1\nsteps: 20\n", "'steps' is there twice(.|\n)*line 3"),
        (b'{"batch": {"global": 8, "global": 16}}', "'global' is there twice"),
        (b"steps: !!bool maybe", "'maybe' is not of the tag"),
        (b"steps: !!timestamp soon", "'soon' is not of the tag"),
        (b"a:\n  steps: !!int ten", "'ten' is not of the tag(.|\n)*line 2"),
        (LAUGHTER, "has aliases that expand to more than 1,000,000 values"),
    ],
)
def test_what_is_neither_is_refused_in_words(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "spec"
    path.write_bytes(content)
    with pytest.raises(TrivetError, match=said):
        specs.load(str(path))


def test_a_change_of_what_an_alias_repeats_is_a_change_of_one_place(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("a: &mesh {tp: 2}\nb: *mesh\n")
    assert specs.load(str(path), ["a.tp=4"]) == {"a": {"tp": 4}, "b": {"tp": 2}}


def test_fields_of_json_with_tabs_have_their_places(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text('{\n\t"kind": "train",\n\t"name": "\\ud83d\\ude82",\n\t"steps": 1e0\n}')
    given_spec = specs.read(str(path))
    assert given_spec.spec == {"kind": "train", "name": "🚂", "steps": 1.0}
    assert given_spec.place("steps") == "spec.json:4:2"
    changed = specs.read(str(path), ["extra.lr=1"])
    assert changed.place("extra") == "--set"  # no line of the file has it
