"""Results files, and witnesses replayed as the competition replays them."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from competition_instances import BOX, DECLARED, NETWORK, NEVER, SATISFIED
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from service.formats.vnnlib import parse
from trivet.vnncomp.answers import Decided, Witness, WitnessFormatError, verdict_of
from trivet.vnncomp.witness import ReplayedNetwork, ReplayError, replayed

Numbers = st.lists(st.floats(allow_nan=False), min_size=1, max_size=4).map(tuple)


def as_the_rules_read(text: str) -> tuple[list[float], list[float]]:
    """Read a witness file as ``counterexamples.py`` of the competition does."""
    content = text.replace("\n", " ").strip()
    assert content[0] == "("
    assert content[-1] == ")"
    values: dict[str, list[float]] = {"X": [], "Y": []}
    for part in filter(None, (each.strip() for each in content[1:-1].split(")"))):
        assert part[0] == "("
        name, number = part[1:].split(" ")
        assert int(name[2:]) == len(values[name[0]])
        values[name[0]].append(float(number))
    return values["X"], values["Y"]


@given(Numbers, Numbers)
def test_a_results_file_is_the_verdict_and_a_witness_as_the_rules_read_it(
    inputs: tuple[float, ...], outputs: tuple[float, ...]
) -> None:
    first, _, rest = Decided("sat", Witness(inputs, outputs)).text().partition("\n")
    assert first == "sat"
    assert as_the_rules_read(rest) == (list(inputs), list(outputs))
    assert Witness.parse(rest) == Witness(inputs, outputs)


def test_another_verdict_is_all_of_its_file() -> None:
    assert Decided("timeout", reason="60 seconds were spent").text() == "timeout\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("X_0 1", "a witness is"),
        ("((X_0 1) (X_2 1))", r"got '\(X_2 1\)\)' in a witness, expected \(X_1 v\) or \(Y_0 v\)"),
        ("((X_0 one))", "got 'one' in a witness, expected a number"),
    ],
)
def test_a_text_that_is_no_witness_is_refused_where_it_ceases_to_be_one(text: str, told: str) -> None:
    with pytest.raises(WitnessFormatError, match=told):
        Witness.parse(text)


@pytest.mark.parametrize(
    ("word", "verdict"),
    [
        ("holds", "unsat"),
        ("violated", "sat"),
        ("timeout(X_0", "timeout"),
        ("run_instance_timeout", "timeout"),
        ("", "unknown"),
    ],
)
def test_words_of_other_tools_are_read_as_the_rules_do(word: str, verdict: str) -> None:
    assert verdict_of(word) == verdict


def test_a_witness_has_the_outputs_of_onnxruntime_at_numbers_of_the_networks_type() -> None:
    found = replayed(ReplayedNetwork(NETWORK), parse(SATISFIED), [0.1, -0.3, 0.0, 0.05, 0.1])
    assert found.is_strict
    x = np.asarray([found.witness.inputs], np.float32)
    assert (x.astype(float) == [found.witness.inputs]).all()
    assert x.max() <= 0.1  # the float32 nearest to 0.1 is above it
    (outputs,) = onnxruntime.InferenceSession(NETWORK).run(None, {"x": x})
    assert list(found.witness.outputs) == outputs[0].tolist()


def test_an_input_beside_the_box_counts_within_the_tolerance_only() -> None:
    narrow = DECLARED + "".join(f"(assert (= X_{index} 0.1))" for index in range(5)) + "(assert (>= Y_0 -100))"
    assert not replayed(ReplayedNetwork(NETWORK), parse(narrow), [0.1] * 5).is_strict
    with pytest.raises(ReplayError, match=r"more than 0\.0001 away"):
        replayed(ReplayedNetwork(NETWORK), parse(SATISFIED), [0.2] * 5)


def test_an_end_that_an_interval_lacks_is_beside_it() -> None:
    """Of the first input the float32 nearest to the point is the end; between the last one's ends there is none."""
    first = "(assert (< X_0 1))(assert (> X_0 0.9))(assert (>= Y_0 -100))"
    others = "".join(f"(assert (= X_{index} 0))" for index in range(1, 4))
    last = "(assert (= X_4 0))", "(assert (< X_4 0.00001))(assert (> X_4 0))(assert (< X_4 1e-50))"
    found = [
        replayed(ReplayedNetwork(NETWORK), parse(f"{DECLARED}{first}{others}{each}"), [1 - 1e-9, 0, 0, 0, 0])
        for each in last
    ]
    assert [each.is_strict for each in found] == [True, False]
    assert found[0].witness.inputs[0] == float(np.nextafter(np.float32(1), np.float32(0)))


def test_a_witness_whose_outputs_do_not_satisfy_the_query_is_refused() -> None:
    with pytest.raises(ReplayError, match="its outputs there do not satisfy the query"):
        replayed(ReplayedNetwork(NETWORK), parse(NEVER), [0.0] * 5)


def test_conditions_of_inputs_are_part_of_the_query() -> None:
    with pytest.raises(ReplayError, match="do not satisfy the query"):
        replayed(ReplayedNetwork(NETWORK), parse(f"{SATISFIED}(assert (<= (+ X_0 X_1) -0.5))"), [-0.2] * 5)


def test_a_network_of_whole_numbers_or_of_other_sizes_is_no_replay() -> None:
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)
    ends = [helper.make_tensor_value_info(name, kind, [1, 5]) for name, kind in (("x", 7), ("y", 1))]
    graph = helper.make_graph([node], "cast", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with pytest.raises(ReplayError, match=r"inputs are tensor\(int64\)"):
        ReplayedNetwork(model.SerializeToString())
    with pytest.raises(ReplayError, match="cannot load the network"):
        ReplayedNetwork(b"no network")
    other = f"{DECLARED}(declare-const X_5 Real){BOX}(assert (<= X_5 0))(assert (>= X_5 0))(assert (>= Y_0 -100))"
    with pytest.raises(ReplayError, match="5 inputs, and the query 6"):
        replayed(ReplayedNetwork(NETWORK), parse(other), [0.0] * 6)
