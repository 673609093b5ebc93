"""Uploaded VNN-LIB queries and ONNX models at submit: what is read, what is refused and in which words."""

from __future__ import annotations

import gzip
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx_models import model, node
from pydantic import ValidationError
from uploaded_queries import FIRST, MLP, MODEL, PAIRED, PAIRS, SECOND, network, problems, query, tarred, zipped

from service.formats.vnnlib import VnnlibError, parse, sources
from service.formats.vnnlib.formulas import MOST_DISJUNCTS
from service.jobs.kinds.registry import spec_adapter
from service.jobs.records import Problem


def test_files_archives_and_lists_of_them_are_taken(tmp_path: Path) -> None:
    members: dict[str, bytes | str] = {
        "b/2.vnnlib": query(),
        "a/1.vnnlib.gz": gzip.compress(query().encode()),
        "x.txt": "?",
    }
    for content in (query(), gzip.compress(query().encode()), zipped(members), tarred(members)):
        assert problems(tmp_path, {MODEL: network(), FIRST: content}) == []
        assert problems(tmp_path, {MODEL: network(outputs=None), FIRST: content}) == []
        assert problems(tmp_path, {MODEL: gzip.compress(network()), FIRST: content}) == []
    found = sources(tmp_path / FIRST)
    assert [(each.name, each.text) for each in found] == [("a/1.vnnlib.gz", query()), ("b/2.vnnlib", query())]
    both = {"property": {"vnnlib": [FIRST, SECOND]}}
    assert problems(tmp_path, {MODEL: network(), FIRST: query(), SECOND: zipped(members)}, **both) == []


@pytest.mark.parametrize(
    ("files", "path", "words"),
    [
        ({FIRST: query(rest="(assert (<= Y_0 zero))")}, "property.vnnlib", "line 8: got 'zero', expected a number"),
        ({FIRST: query(rest="(assert (<= Y_1 0))")}, "property.vnnlib", "line 8: got 'Y_1', expected a variable"),
        ({FIRST: query(rest="(assert (xor Y_0 0))")}, "property.vnnlib", "line 8: got 'xor', expected and, or"),
        ({FIRST: query(rest="(assert ())")}, "property.vnnlib", "line 8: got 'assert', expected (and …)"),
        ({FIRST: query(3)}, "property.vnnlib", "the query has 3 inputs and 1 outputs, the model takes 2 and gives 1"),
        ({FIRST: query(2, 2)}, "property.vnnlib", "has 2 inputs and 2 outputs, the model takes 2 and gives 1"),
        ({FIRST: query(rest="(assert (<= 2 X_0))")}, "property.vnnlib", "no input satisfies"),
        ({FIRST: zipped({"p.vnnlib": query(3)})}, "property.vnnlib", "p.vnnlib: the query has 3 inputs"),
        ({FIRST: zipped({"p.vnnlib": "(assert"})}, "property.vnnlib", "p.vnnlib: line 1: got '('"),
        ({FIRST: zipped({"p.txt": query()})}, "property.vnnlib", "archive of 1 files has none that ends in .vnnlib"),
        ({FIRST: b"\x1f\x8b broken"}, "property.vnnlib", "the file is damaged"),
        ({FIRST: b"\xff\xfe\x00"}, "property.vnnlib", "the file is not text (byte 0"),
        ({FIRST: ""}, "property.vnnlib", "X_0 is not declared"),
        ({FIRST: query(), MODEL: b"no model"}, "model.onnx", "the file is not an ONNX model"),
        ({FIRST: query(), MODEL: gzip.compress(network())[:-9]}, "model.onnx", "the file is damaged"),
        ({FIRST: query(), MODEL: network(opset=5)}, "model.onnx", "ONNX opset 5: 8 to 24"),
        ({FIRST: query(), MODEL: network(kind=TensorProto.BOOL)}, "model.onnx", "input 'x' is BOOL"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_or_does_not_fit_is_refused_by_field_line_and_token(
    tmp_path: Path, files: dict[str, bytes | str], path: str, words: str
) -> None:
    (problem,) = problems(tmp_path, {MODEL: network(), **files})
    assert problem.path == path
    assert words in problem.message


def picture(*nodes: Any, shape: tuple[int | str, ...] = ("batch", 3, 2, 4)) -> bytes:
    return model([*nodes, node("Flatten", [nodes[-1].output[0] if nodes else "x"])], shape)


def test_pictures_are_compared_as_shapes_with_the_model_s_input(tmp_path: Path) -> None:
    """A file of the other layout has as many numbers, in another order."""
    content = BytesIO()
    np.savez(content, inputs=np.zeros((4, 2, 4, 3), np.float32), targets=np.arange(4) % 2)
    data = {"source": "file", "format": "arrays", "file": FIRST, "shape": [2, 4, 3], "classes": 2}
    files: dict[str, bytes | str] = {MODEL: picture(), FIRST: content.getvalue()}

    def found(**more: Any) -> list[Problem]:
        return problems(tmp_path, files, property={"robustness": {"data": data | more, "eps": 0.1, "count": 1}})

    (problem,) = found()
    assert problem.path == "property.robustness.data.shape"
    assert "the model reads inputs of shape (1, 3, 2, 4), the data are of shape (2, 4, 3)" in problem.message
    assert "axes=[2, 0, 1]" in problem.expected
    assert found(axes=[2, 0, 1]) == []


@pytest.mark.parametrize(
    ("declared", "given", "misfit"),
    [
        ("[3,2,4]", "[24]", None),
        ("[24]", "[1,3,2,4]", None),
        ("[1,2,4,3]", "[24]", "the query declares its input as [1,2,4,3], the model's is [1,3,2,4]"),
        ("[1,3,2,4]", "[3,4,2]", "the query declares its output as [3,4,2], the model's is [1,3,2,4]"),
    ],
)
def test_a_query_numbers_entries_by_the_model_s_own_shapes(
    tmp_path: Path, declared: str, given: str, misfit: str | None
) -> None:
    pictures = TensorProto.FLOAT, ["batch", 3, 2, 4]
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "g",
        *([helper.make_tensor_value_info(name, *pictures)] for name in "xy"),
    )
    content = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()
    places = [np.unravel_index(place, json.loads(declared)) for place in range(24)]
    names = [f"X[{','.join(map(str, place))}]" for place in places]
    text = (
        f"(vnnlib-version <2.0>)(declare-network f (declare-input X real {declared}) (declare-output Y real {given}))"
        + "".join(f"(assert (<= 0 {name} 1))" for name in names)
    )
    found = problems(tmp_path, {MODEL: content, FIRST: text})
    assert [each.message for each in found] == ([] if misfit is None else [misfit])


@pytest.mark.parametrize(
    ("nodes", "is_refused"),
    [
        ([node("MaxPool", ["x"], "p", kernel_shape=[1, 1], pads=[1, 0, 0, 0])], True),
        ([node("Relu", ["x"], "r"), node("LpPool", ["r"], "p", kernel_shape=[1, 2], pads=[0, 2, 0, 0])], True),
        (
            [
                node("MaxPool", ["x"], "m", kernel_shape=[1, 2]),
                node("MaxPool", ["m"], "p", kernel_shape=[1, 2], dilations=[1, 4], pads=[0, 1, 0, 1]),
            ],
            True,
        ),
        ([node("MaxPool", ["x"], "p", kernel_shape=[2, 2], pads=[1, 1, 1, 1])], False),
        ([node("AveragePool", ["x"], "p", kernel_shape=[1, 1], pads=[1, 0, 0, 0], count_include_pad=1)], False),
        ([node("MaxPool", ["x"], "p", kernel_shape=b"ab", pads=[1, 0, 0, 0])], False),
        ([node("MaxPool", ["x"], "p", kernel_shape=[2**40, 1], pads=[2**41, 0, 0, 0])], False),
    ],
)
def test_a_window_of_padding_only_is_refused_at_once(tmp_path: Path, nodes: list[Any], *, is_refused: bool) -> None:
    """By the lengths that the file declares, or that follow from them; what cannot be read is left to the rank."""
    found = problems(tmp_path, {MODEL: picture(*nodes), FIRST: query(24, 1)})
    words = [problem.message for problem in found if "holds padding only" in problem.message]
    assert len(words) == is_refused
    assert all(f"(node '{nodes[-1].name}')" in each for each in words)


def test_every_file_of_a_list_is_checked(tmp_path: Path) -> None:
    files: dict[str, bytes | str] = {MODEL: network(), FIRST: query(), SECOND: query(5)}
    (problem,) = problems(tmp_path, files, property={"vnnlib": [FIRST, SECOND]})
    assert problem.path == "property.vnnlib.1"


def test_a_built_in_model_has_sizes_too(tmp_path: Path) -> None:
    assert problems(tmp_path, {FIRST: query()}, model=MLP) == []
    (problem,) = problems(tmp_path, {FIRST: query(2, 3)}, model=MLP)
    assert problem.message == "the query has 2 inputs and 3 outputs, the model takes 2 and gives 1"


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        ({"box": {"lower": [0.0] * 3, "upper": [1.0] * 3}}, "property.box.lower"),
        (
            {"box": {"lower": [0, 0], "upper": [1, 1], "output": [{"coefficients": [1, 1]}]}},
            "property.box.output.0.coefficients",
        ),
        ({"robustness": {"data": {"source": "digits"}, "eps": 0.1}}, "property.robustness.data.source"),
        ({"robustness": {"data": {"source": "digits"}, "eps": 0.1, "count": 10**6}}, "property.robustness.count"),
    ],
)  # fmt: skip
def test_other_properties_are_held_against_the_onnx_model(tmp_path: Path, asked: dict[str, Any], path: str) -> None:
    assert path in [problem.path for problem in problems(tmp_path, {MODEL: network()}, property=asked)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(assert " + "(and " * 500, "at most 100 brackets within each other"),
        ("(declare-const X_999999999 Real)", "X_0 is not declared"),
        (
            "(declare-const X_0 Real)\n(declare-fun X_0 () Real)",
            "expected one declaration of X_0, which line 1 declares",
        ),
        (
            query(rest="(assert (and " + "(or (<= Y_0 0) (<= Y_0 1))" * 40 + "))"),
            f"at most {MOST_DISJUNCTS} are supported",
        ),
        (query(rest="(assert (<= Y_0 nan))"), "got 'nan', expected a number"),
        (query(rest="(assert (<= Y_0 1_0))"), "got '1_0', expected a number"),
        (query(rest="(assert (<= Y_0 1e9999))"), "got '1e9999', expected a number of at most 1000 digits"),
    ],
)
def test_texts_made_to_hurt_are_refused_quickly(text: str, words: str) -> None:
    with pytest.raises(VnnlibError) as refused:
        parse(text)
    assert words in str(refused.value)


def test_cases_with_one_box_share_it() -> None:
    cases = parse(query(rest="(assert (or " + "(<= Y_0 0)" * 500 + "))")).disjuncts
    assert len(cases) == 500
    assert len({id(case.lower) for case in cases}) == 1


def of_digits(**asked: Any) -> dict[str, Any]:
    return {"property": {"robustness": {"data": {"source": "digits"}, "eps": 0.1, **asked}}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"intermediate": "fixed"}, "method=crown has no bounds that could be fixed"),
        ({"property": {"vnnlib": []}}, "at least 1 item"),
        ({"budget": {"domains": 0}}, "greater than or equal to 1"),
        ({"method": "gamma-crown"}, "alpha-crown"),
        (of_digits(norm=3), "'inf', 2, 1 or 0"),
        (of_digits(norm=True), "'inf', 2, 1 or 0"),
        (of_digits(norm=0), "norm 0 counts the entries that change; expected how many may change"),
        (of_digits(norm=0, entries=0), "greater than or equal to 1"),
        (of_digits(norm=0, entries=65), "a sample has 64 entries; expected at most 64, or norm: inf"),
        (of_digits(norm=1, entries=3), "norm=1 lets every entry change; expected none, or norm: 0"),
        (of_digits(norm=1, eps=-1), "greater than 0"),
    ],
)
def test_specs_that_say_what_cannot_be_are_refused(fields: dict[str, Any], words: str) -> None:
    given = {"kind": "verify", "model": MLP, "property": {"vnnlib": FIRST}, **fields}
    with pytest.raises(ValidationError) as refused:
        spec_adapter.validate_python(given)
    assert words in str(refused.value)


@pytest.mark.parametrize("packed", [zipped, tarred])
def test_pairs_that_fit_are_accepted(tmp_path: Path, packed: Any) -> None:
    rows = "a.onnx,q.vnnlib,5\nb.onnx,three.vnnlib\n"
    assert not problems(tmp_path, {SECOND: packed({**PAIRS, "instances.csv": rows})}, **PAIRED)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("b.onnx,three.vnnlib\na.onnx,three.vnnlib\n", "line 2, a.onnx three.vnnlib: the query has 3 inputs"),
        ("a.onnx,q.vnnlib\nc.onnx,q.vnnlib\n", "line 2: the archive has no c.onnx"),
        ("q.vnnlib,q.vnnlib\n", "line 1, q.vnnlib: the file is not an ONNX model"),
        ("a.onnx,a.onnx\n", "line 1, a.onnx: "),
        ("a.onnx,q.vnnlib,-1\n", "line 1: got '-1', expected seconds above 0"),
    ],
)
def test_pairs_that_do_not_fit_are_refused_with_their_line(tmp_path: Path, rows: str, words: str) -> None:
    found = problems(tmp_path, {SECOND: zipped({**PAIRS, "instances.csv": rows})}, **PAIRED)
    assert [(each.path, each.got) for each in found] == [("property.instances", SECOND)]
    assert found[0].message.removeprefix("instances.csv ").startswith(words)


RULELESS = network(operator="BitShift")


def test_an_operator_without_a_rule_is_refused_by_name(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, {MODEL: RULELESS, FIRST: query()})
    assert (found.path, found.message) == ("model.onnx", "no rule for ONNX BitShift (node 'first')")
    assert found.expected == "a model without them"


@pytest.mark.parametrize(
    ("rows", "parallel", "refused"),
    [
        ("a.onnx,q.vnnlib\nodd.onnx,q.vnnlib\n", {}, False),
        ("a.onnx,q.vnnlib\nodd.onnx,q.vnnlib\n", {"dp_replicate": 2}, False),
        ("odd.onnx,q.vnnlib\n", {}, True),
        ("a.onnx,q.vnnlib\nodd.onnx,q.vnnlib\n", {"tp": 2}, True),
        ("a.onnx,q.vnnlib\nodd.onnx,q.vnnlib\n", {"pp": 2}, True),
    ],
)
def test_one_of_many_models_may_have_no_rule_where_each_rank_has_it_whole(
    tmp_path: Path, rows: str, parallel: dict[str, int], refused: bool
) -> None:
    content = zipped({**PAIRS, "odd.onnx": RULELESS, "instances.csv": rows})
    found = problems(tmp_path, {SECOND: content}, **PAIRED, parallel=parallel)
    message = "odd.onnx: no rule for ONNX BitShift (node 'first')"
    assert [(each.path, each.message) for each in found] == [("property.instances", message)] * refused


def test_a_bundle_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, {SECOND: b"a.onnx,q.vnnlib\n"}, **PAIRED)
    assert "expected a zip or an uncompressed tar of instances.csv" in found.message
