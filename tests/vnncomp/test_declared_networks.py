"""The solver interface of VNN-LIB 2.0: networks as they are declared, witnesses, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from competition_instances import NETWORK, VERSION_2
from onnx import numpy_helper
from onnx_models import model, node
from typer.testing import CliRunner

from service.formats.vnnlib.declared import are_in_one_order
from trivet.cli.main import program
from trivet.errors import TrivetError
from trivet.vnncomp.answers import WitnessFormatError
from trivet.vnncomp.deciding import decide
from trivet.vnncomp.declared import DeclaredWitness
from trivet.vnncomp.instances import BenchmarkError, BenchmarkInstance, networks_in
from trivet.vnncomp.questions import Question

RELU = model([node("Relu", ["x"], "h"), node("Neg", ["h"])], [1, 2])
PAIR = """(vnnlib-version <2.0>)
(declare-network f (declare-input A real [1,2]) (declare-hidden H float32 [2] "h") (declare-output B float32 [1,2]))
(declare-network g (equal-to f) (declare-input C real [1,2]) (declare-output D float32 [1,2]))
(assert (and (>= A[0,0] 1) (<= A[0,0] 2) (== A[0,1] 0) (== C[0,0] A[0,0]) (== C[0,1] 0.5) (< H[0] (+ A[0,0] 1))))
"""
WIDE = f"""(vnnlib-version <2.0>) (declare-network f (declare-input X real [6]) (declare-output Y real [3,2]))
{"".join(f"(assert (== X[{place}] 0))" for place in range(6))}
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, content in (("net.onnx", NETWORK), ("relu.onnx", RELU)):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "pair.vnnlib").write_text(PAIR)
    (tmp_path / "one.vnnlib").write_text(VERSION_2)
    (tmp_path / "wide.onnx").write_bytes(model([node("Relu", ["x"])], [1, 2, 3]))
    (tmp_path / "wide.vnnlib").write_text(WIDE)
    (tmp_path / "old.vnnlib").write_text("(declare-const X_0 Real)(declare-const Y_0 Real)(assert (= X_0 0))")
    return tmp_path


def read(files: Path, query: str, **networks: str) -> Question:
    given: Any = {name: files / path for name, path in networks.items()}
    return Question.read("tiny", given, files / query)


def test_a_witness_has_every_declared_tensor(files: Path) -> None:
    question = read(files, "pair.vnnlib", f="relu.onnx")
    row = {"verdict": "falsified", "counterexample": [1.5, 0.0, 1.5, 0.5]}
    found = decide(lambda: question, lambda *_: row, 5.0)
    values = {"A": (1.5, 0.0), "H": (1.5, 0.0), "B": (-1.5, -0.0), "C": (1.5, 0.5), "D": (-1.5, -0.5)}
    assert isinstance(found.witness, DeclaredWitness)
    assert {tensor.name: each for tensor, each in found.witness.tensors()} == values
    assert found.text().startswith("sat\nA real [1,2]\n1.5\n0.0\nH float32 [2]\n1.5\n")
    assert question.parse_witness(found.witness.text()).inputs == found.witness.inputs
    with pytest.raises(WitnessFormatError, match=r"got 'A real \[2\]' in a witness, expected A real \[1,2\]"):
        question.parse_witness("A real [2]")
    content = dict(found.witness.serialised())
    tensors = {name: onnx.TensorProto.FromString(each) for name, each in content.items()}
    assert {name: numpy_helper.to_array(each).dtype.name for name, each in tensors.items()}["A"] == "float64"
    assert numpy_helper.to_array(tensors["D"]).tolist() == [[-1.5, -0.5]]


@pytest.mark.parametrize(
    ("query", "networks", "message"),
    [
        ("pair.vnnlib", {"g": "relu.onnx"}, "there is no file for the network f"),
        ("pair.vnnlib", {"f": "relu.onnx", "N": "relu.onnx"}, "declares no network N; it declares f, g"),
        ("pair.vnnlib", {"f": "relu.onnx", "g": "net.onnx"}, "g is equal to f, and its file is another"),
        ("pair.vnnlib", {"f": "net.onnx"}, "network f computes no value 'h'"),
        ("one.vnnlib", {"f": "relu.onnx"}, r"line 2: X is real \[1,5\], and in the network float32 \[1,2\]"),
        ("wide.vnnlib", {"f": "wide.onnx"}, r"Y is real \[3,2\], and in the network float32 \[1,2,3\]"),
        ("old.vnnlib", {"f": "relu.onnx", "g": "relu.onnx"}, "is VNN-LIB 1, about one network, and there are 2"),
    ],
)
def test_networks_that_are_not_as_declared_are_refused(
    files: Path, query: str, networks: dict[str, str], message: str
) -> None:
    with pytest.raises(BenchmarkError, match=message):
        read(files, query, **networks)


@pytest.mark.parametrize(
    ("first", "second", "are"),
    [((2, 3, 4), (6, 4), True), ((2, 12), (1, 2, 3, 4), True), ((6, 4), (2, 12), False), ((4, 6), (6, 4), False)],
)
def test_neighbouring_axes_may_be_declared_as_one(first: tuple[int, ...], second: tuple[int, ...], are: bool) -> None:
    assert are_in_one_order(first, second) is are_in_one_order(second, first) is are


def test_a_query_that_no_input_satisfies_is_unsat_without_a_search(files: Path) -> None:
    (files / "pair.vnnlib").write_text(f"{PAIR}(assert (> C[0,0] 2))")
    found = decide(lambda: read(files, "pair.vnnlib", f="relu.onnx"), lambda *_: pytest.fail("it searched"), 5.0)
    assert found.verdict == "unsat"


def test_networks_of_an_instance_have_the_competitions_names() -> None:
    cell = "[('f', 'onnx/a.onnx'), ('g', 'onnx/b.onnx')]"
    instance = BenchmarkInstance("tiny", Path("home"), cell, "./vnnlib/p_0.vnnlib", 1.0)
    assert instance.networks == {"f": Path("home/onnx/a.onnx"), "g": Path("home/onnx/b.onnx")}
    assert instance.witness_name == "f_g_p_0.counterexample.gz"
    for wrong in ("[('f', )]", "[('f', 'a.onnx'), ('f', 'b.onnx')]"):
        with pytest.raises(TrivetError, match="expected a network or"):
            networks_in(wrong)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--name"], 0, "Trivet\n"),
        (["supports", "--vnnlib-versions"], 0, "2.0\n2.0\n"),
        (["supports", "--hidden-node-theories"], 0, "NH\nH\n"),
        (["supports", "--onnx-opset-versions"], 0, "8\n24\n"),
        (["supports", "--nothing"], 2, "expected one of --onnx-opset-versions"),
        (["verify", "pair.vnnlib", "--network", "relu.onnx"], 2, "expected NAME=FILE"),
        (
            ["verify", "pair.vnnlib", "--network", "f=relu.onnx"],
            2,
            "line 2: H is float32, and bounds are those of real",
        ),
        (["verify", "old.vnnlib", "--network", "f=relu.onnx"], 2, "is VNN-LIB 1"),
    ],
)
def test_what_the_commands_say(
    files: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, told: str
) -> None:
    monkeypatch.chdir(files)
    found = CliRunner().invoke(program(["vnnlib"]), ["vnnlib", *words])
    assert found.exit_code == code
    assert told in found.output.replace("\n  ", " ")
