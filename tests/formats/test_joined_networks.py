"""Networks side by side in one file: what it computes, what is refused, and queries about several networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from onnx_models import dense, model, node

from service.bounds.methods import CROWN
from service.formats.onnx import JoinedPart, OnnxError, join_networks
from service.formats.vnnlib import parse_networks
from service.verification.bab.driver import decide
from service.verification.bab.model import ModelUnderVerification
from service.verification.verdict import Verdict

FIRST, SECOND = dense([3, 4, 2], batch=1), model([node("Relu", ["x"], "h"), node("Neg", ["h"])], [1, 2])
PAIR = """(vnnlib-version <2.0>)
(declare-network f (declare-input A real [1]) (declare-hidden H real [1] "h") (declare-output B real [1]))
(declare-network g (equal-to f) (declare-input C real [1]) (declare-output D real [1]))
(assert (and (>= A[0] -1) (<= A[0] 1) (>= C[0] (+ A[0] 0.5)) (<= C[0] 2)))
"""


def ran(content: bytes, **given: list[list[float]]) -> list[Any]:
    feeds = {name[1:].replace("_", "."): np.array(values, np.float32) for name, values in given.items()}
    return list(onnxruntime.InferenceSession(content).run(None, feeds))


def test_a_joined_file_gives_what_its_networks_give() -> None:
    x, z = [[0.5, -1.0, 2.0]], [[-1.0, 3.0]]
    both = join_networks([JoinedPart("f", FIRST), JoinedPart("g", SECOND, ("h",))], gives_inputs=True)
    found = ran(both, v0_x=x, v1_x=z)
    alone = [*ran(FIRST, vx=x), np.array([[0.0, 3.0]]), *ran(SECOND, vx=z), np.array(x), np.array(z)]
    assert [each.tolist() for each in found] == [each.tolist() for each in alone]


def with_domain(name: str, version: int) -> bytes:
    made = onnx.load_from_string(FIRST)
    made.opset_import.append(helper.make_opsetid(name, version))
    content: bytes = made.SerializeToString()
    return content


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (JoinedPart("g", SECOND, ("nothing",)), "network g computes no value 'nothing'"),
        (JoinedPart("g", model([node("Neg", ["x"])], [1, 2], opset=13)), "f and g are of ONNX opsets 17 and 13"),
        (JoinedPart("g", with_domain("ai.onnx.ml", 3)), "f and g have ai.onnx.ml in versions 1 and 3"),
        (JoinedPart("g", model([node("Neg", ["x"])], [1, 2], kind=11)), "f and g take inputs of several types"),
    ],
)
def test_what_cannot_be_joined_is_refused_by_name(other: JoinedPart, message: str) -> None:
    with pytest.raises(OnnxError, match=message):
        join_networks([JoinedPart("f", with_domain("ai.onnx.ml", 1)), other])


@pytest.mark.parametrize(
    ("asked", "verdict"),
    [
        ("(assert (>= D[0] (+ B[0] 0.1)))", Verdict.VERIFIED),  # -relu(x) falls
        ("(assert (and (<= (+ B[0] 0.4) 0) (<= D[0] -1)))", Verdict.FALSIFIED),
        ("(assert (and (>= H[0] 0.3) (<= A[0] 0.2)))", Verdict.VERIFIED),
        ("(assert (< (+ H[0] B[0] 1.2) A[0]))", Verdict.VERIFIED),  # all three of one network
        ("(assert (> (- H[0] B[0] 0.5) A[0]))", Verdict.FALSIFIED),
    ],
)
def test_queries_about_two_networks_are_decided(asked: str, verdict: Verdict) -> None:
    network = model([node("Relu", ["x"], "h"), node("Neg", ["h"])], [1, 1])
    read = parse_networks(f"{PAIR}{asked}")
    parts = [JoinedPart("f", network, ("h",)), JoinedPart("g", network)]
    subject = ModelUnderVerification.of(join_networks(parts, gives_inputs=read.compares_inputs), torch.float64)
    assert decide(subject, read.query, CROWN, 20.0).verdict is verdict
