"""Points by the rules, on tables written by hand."""

from __future__ import annotations

from trivet.vnncomp.scoring import Key, ToolResult, WitnessEvidence, missed, points_of, scores

A, B, C, D = ((("small", f"onnx/{name}.onnx", "vnnlib/p.vnnlib")) for name in "abcd")


def sat(evidence: WitnessEvidence, seconds: float = 1.0) -> ToolResult:
    return ToolResult("sat", seconds, evidence)


UNSAT, TIMEOUT = ToolResult("unsat", 2.0), ToolResult("timeout", 60.0, reason="60 seconds were spent")


def test_a_table_by_hand() -> None:
    own = {A: UNSAT, B: sat(WitnessEvidence.STRICT), C: UNSAT, D: TIMEOUT}
    peer = {A: UNSAT, B: UNSAT, C: sat(WitnessEvidence.STRICT), D: UNSAT}
    trivet, other = scores([A, B, C, D], {"trivet": own, "other": peer}, {})
    assert (trivet.points, trivet.unsat, trivet.sat, trivet.wrong, trivet.seconds) == (10 + 10 - 150, 1, 1, [C], 3.0)
    assert (other.points, other.unsat, other.sat, other.wrong) == (10 - 150 + 10 + 10, 2, 1, [B])
    assert trivet.percent == other.percent == 0.0  # nobody has points
    assert missed([A, B, C, D], own, {"other": peer}, {A: "unsat"}) == [(D, ["other"])]
    assert missed([C, D], own, {"other": peer}, {C: "sat", D: "unsat"}) == [(D, ["other", "its label (unsat)"])]
    assert missed([D], own, {}, {D: "unsat"}) == [(D, ["its label (unsat)"])]


def test_the_score_is_in_per_cent_of_the_best_of_the_category() -> None:
    large: Key = ("large", "onnx/a.onnx", "vnnlib/p.vnnlib")
    own, peer = {A: UNSAT, B: UNSAT, large: UNSAT}, {A: UNSAT, large: sat(WitnessEvidence.REFUTED)}
    found = {(each.category, each.tool): each.percent for each in scores([A, B, large], {"x": own, "y": peer}, {})}
    assert found == {("small", "x"): 100.0, ("small", "y"): 50.0, ("large", "x"): 100.0, ("large", "y"): 0.0}


def test_speed_gives_nothing() -> None:
    fast, slow = {A: sat(WitnessEvidence.STRICT, 0.1)}, {A: sat(WitnessEvidence.STRICT, 50.0)}
    assert [each.points for each in scores([A], {"fast": fast, "slow": slow}, {})] == [10, 10]


def test_a_witness_decides_and_a_label_where_there_is_none() -> None:
    assert points_of(UNSAT, "sat") == points_of(sat(WitnessEvidence.REFUTED), "sat") == -150
    assert points_of(sat(WitnessEvidence.NEARBY), "unsat") == points_of(sat(WitnessEvidence.STRICT), None) == 10
    assert points_of(sat(WitnessEvidence.NONE), "unsat") == -150
    assert points_of(sat(WitnessEvidence.NONE), "sat") == 10
    (score,) = scores([A], {"trivet": {A: UNSAT}}, {A: "sat"})
    assert score.wrong == [A]


def test_a_witness_beside_the_box_makes_nobody_wrong() -> None:
    found = scores([A], {"trivet": {A: UNSAT}, "other": {A: sat(WitnessEvidence.NEARBY)}}, {})
    assert [each.points for each in found] == [10, 10]
