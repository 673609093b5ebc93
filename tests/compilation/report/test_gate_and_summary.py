"""What the results open, and what is said of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.compilation.judgement import Result
from service.compilation.report.publishing import break_even_steps, gate, highest_safe, why_unproved
from service.compilation.report.rows import counts, metrics, rung_row
from service.compilation.report.summary import summary
from service.compilation.run.observation import Cost, Observation, RungCase, Timed
from service.compilation.run.run_plan import RunPlan
from service.compilation.run.timing import Race, RaceSettings, plan_race, summarise
from service.compilation.rungs import LADDER, climb_to
from service.compilation.selftest import Proof
from service.compilation.verdicts import SEVERITY, Finding, Verdict, worst
from service.jobs.spec.compile import Tolerance

FINGERPRINT = {"torch": "x"}
PROVED = Proof("vacuous", "a forward that may not be compiled", True, "no graph")


def cost(eager: float, compiled: float, faster: bool, *, noisy: bool = False) -> Cost:
    race = Race(compiled, eager, compiled / eager, noisy=noisy, faster=faster)
    return Cost(10.0, 1.0, Timed(race), None, None)


def row(rung: int, verdict: Verdict, price: Cost | None = None, message: str = "why") -> Result:
    case = RungCase(LADDER[rung], "train")
    findings = () if verdict == "pass" else (Finding(verdict, message),)
    return Result(case, verdict, findings, Observation(case, cost=price) if verdict != "not_reached" else None)


@given(st.lists(st.sampled_from(SEVERITY), max_size=3))
def test_the_gate_is_the_last_of_an_unbroken_row_of_passes(verdicts: list[Verdict]) -> None:
    results = [row(index, verdict) for index, verdict in enumerate(verdicts)]
    best = highest_safe(results, "train")
    applicable = [(LADDER[index], verdict) for index, verdict in enumerate(verdicts) if verdict != "not_applicable"]
    passes = next((index for index, (_, verdict) in enumerate(applicable) if verdict != "pass"), len(applicable))
    assert (best.case.rung if best else None) == (applicable[passes - 1][0] if passes else None)


def test_a_rung_that_does_not_apply_breaks_no_row_of_passes_and_is_told_with_its_reason() -> None:
    results = [row(0, "not_applicable", message="draws other numbers"), row(1, "pass", cost(2, 1, True))]
    assert highest_safe(results, "train") is results[1]
    opened = gate(results, ["train"], FINGERPRINT, None)
    assert opened["train"] == "aot_eager"
    assert "all 1 rungs passed; eager not applicable (draws other numbers)" in " ".join(summary(results, opened))
    assert highest_safe([results[0], row(1, "fail_parity"), row(2, "pass")], "train") is None


@given(st.lists(st.sampled_from(SEVERITY)))
def test_the_worst_verdict_is_none_of_the_better_ones(verdicts: list[Verdict]) -> None:
    found = worst(verdicts)
    assert found == "pass" if not verdicts else all(SEVERITY.index(each) <= SEVERITY.index(found) for each in verdicts)


def test_only_rungs_that_generate_code_are_timed_at_length() -> None:
    plan = RunPlan(4, 2, 4, Tolerance(), float)
    budgets = [plan.race_of(rung).budget_s for rung in LADDER]
    assert budgets == [0.5, 0.5, 0.5, 3.0, 3.0]


def test_a_phase_that_was_not_checked_is_not_allowed_and_has_no_worth() -> None:
    opened = gate([row(0, "pass", cost(1, 1, False))], ["train"], FINGERPRINT, None)
    assert opened["train"] == "eager"
    assert opened["inference"] is None
    assert set(opened["worth"]) == {"train"}
    assert opened["fingerprint"] == FINGERPRINT


def test_worth_counts_the_toolchain_into_the_break_even() -> None:
    opened = gate([row(0, "pass", cost(0.5, 0.25, True))], ["train"], FINGERPRINT, toolchain_s=5.0)
    assert opened["worth"]["train"]["worth_it"]
    assert opened["worth"]["train"]["break_even_steps"] == 60


@pytest.mark.parametrize(
    ("compile_s", "saved", "steps"), [(10, 0.1, 100), (10, 0.3, 34), (10, 0, None), (10, -1, None)]
)
def test_break_even(compile_s: float, saved: float, steps: int | None) -> None:
    assert break_even_steps(compile_s, saved) == steps


def test_the_summary_says_what_is_allowed_what_stopped_it_and_what_it_is_worth() -> None:
    passed = [row(0, "pass", cost(1, 1, False)), row(1, "pass", cost(1, 2, False))]
    results = [*passed, row(2, "frozen", message="no gradient: w"), row(3, "not_reached")]
    opened = gate(results, ["train"], FINGERPRINT, None)
    assert summary(results, opened) == [
        "Training may be compiled with aot_eager: aot_eager_decomp_partition does not train (no gradient: w).",
        "It is not worth it: a compiled step takes 2.00× an eager one.",
    ]


@pytest.mark.parametrize(
    ("faster", "told"),
    [
        (False, "The gain is unclear: the timing was noisy (0.50×)."),
        (True, "It is worth it: a compiled step takes 0.50× an eager one (the timing was noisy), compiling is"),
    ],
)
def test_a_noisy_race_is_no_reason_against_compiling(faster: bool, told: str) -> None:
    results = [row(0, "pass", cost(1, 1, False)), row(1, "pass", cost(1, 0.5, faster, noisy=True))]
    [sentence] = summary(results, gate(results, ["train"], FINGERPRINT, None))[1:]
    assert sentence.startswith(told)


def test_the_summary_forbids_what_failed_at_once() -> None:
    results = [row(0, "vacuous", message="no graph"), row(1, "not_reached"), row(2, "not_reached")]
    opened = gate(results, ["train"], FINGERPRINT, None)
    assert summary(results, opened) == ["Training must not be compiled: eager proves nothing (no graph)."]
    assert counts(results) == {"vacuous": 1, "not_reached": 2}


def test_the_summary_of_what_compiles_nothing_says_so() -> None:
    only, stopped = [row(0, "pass", cost(1, 1, False))], [row(0, "pass", cost(1, 1, False)), row(1, "fail_error")]
    assert summary(only, gate(only, ["train"], FINGERPRINT, None)) == [
        "Training has nothing to gain from compiling: only eager, which compiles nothing, was tried and passed."
    ]
    assert summary(stopped, gate(stopped, ["train"], FINGERPRINT, None)) == [
        "Training has nothing to gain from compiling: aot_eager raises an error (why)."
    ]


@pytest.mark.parametrize(
    ("proofs", "why"),
    [
        ((), "the self-test has not run, so no detector is proved"),
        (
            (PROVED, Proof("frozen", "a compiler that loses gradients", False, "")),
            "the self-test failed: detector frozen did not find a compiler that loses gradients",
        ),
        (
            (PROVED, Proof("none", "nothing", True, "vacuous")),
            "the self-test failed: there was a finding on a sound program (vacuous)",
        ),
        ((PROVED,), ""),
    ],
)
def test_detectors_that_are_not_proved_close_the_gate(proofs: tuple[Proof, ...], why: str) -> None:
    results = [row(0, "pass", cost(1, 1, False)), row(1, "pass", cost(0.5, 0.25, True))]
    assert why_unproved(proofs) == why
    opened = gate(results, ["train"], FINGERPRINT, None, closed=why)
    assert opened["train"] == (None if why else "aot_eager")
    assert opened["closed"] == why
    first = (
        f"Nothing may be compiled: {why}." if why else "Training may be compiled with aot_eager: all 2 rungs passed."
    )
    assert summary(results, opened)[0] == first
    assert not why or summary(results, opened)[1:] == ["Training: all 2 rungs passed."]
    results.append(row(2, "vacuous"))
    opened = gate(results, ["train"], FINGERPRINT, None, closed="x")
    assert summary(results, opened)[1] == "Training: aot_eager passed, aot_eager_decomp_partition proves nothing (why)."


def test_a_rung_that_was_not_reached_has_the_same_fields_all_unmeasured() -> None:
    reached, missed = rung_row(row(0, "pass", cost(1, 1, False))), rung_row(row(1, "not_reached"))
    assert reached.keys() == missed.keys()
    measured = {name for name, value in missed.items() if value is not None}
    assert measured == {"rung", "phase", "verdict", "findings"}
    assert metrics(row(1, "not_reached")) == {}


@given(st.floats(1e-6, 100))
def test_a_race_has_enough_rounds_and_blocks_long_enough(seconds: float) -> None:
    repeats, rounds = plan_race(seconds, RaceSettings())
    assert 5 <= rounds <= 9
    assert repeats * seconds >= 0.02 - 1e-9


def test_a_race_is_won_only_in_three_quarters_of_the_rounds() -> None:
    steady = summarise([(1.0, 0.9)] * 8)
    assert (steady.faster, steady.noisy, steady.ratio) == (True, False, 0.9)
    wild = summarise([(1.0, 0.5), (1.0, 1.5)] * 4)
    assert (wild.faster, wild.noisy) == (False, True)


def test_modes_name_rungs_from_the_foot() -> None:
    assert climb_to(("eager", "aot_eager")) == LADDER[:2]
    names = ", ".join(rung.name for rung in LADDER)
    with pytest.raises(ValueError, match=f"modes names 'cudagraphs'; the rungs are {names}"):
        climb_to(("eager", "cudagraphs"))
