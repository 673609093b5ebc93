"""Whose fault it was: rules over what a supervisor saw."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.jobs.events import ErrorEvent
from workers.verdict import Evidence, judge


def raised(rank: int, error: str = "ValueError") -> ErrorEvent:
    return ErrorEvent(type="error", time=0.0, rank=rank, error=error, message="no", traceback="…")


def blame(**fields: Any) -> tuple[str, int | None]:
    outcome = judge(Evidence(**{"cause": "rank_failed", "launcher_code": 1, **fields}))
    assert outcome.status == "failed"
    assert outcome.error is not None
    return outcome.error.type, outcome.error.rank


def test_the_first_exception_counts() -> None:
    assert blame(errors=[raised(2), raised(0, "ConnectionError")]) == ("ValueError", 2)


def test_a_refusal_has_no_traceback_to_look_at() -> None:
    for traceback, artifact in (("…", "errors/attempt-1-rank-2.txt"), ("", None)):
        error = judge(Evidence("rank_failed", 1, errors=[{**raised(2), "traceback": traceback}])).error
        assert error is not None
        assert error.traceback_artifact == artifact


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS])
def test_a_rank_that_was_killed_outranks_its_peers_exceptions(number: signal.Signals) -> None:
    codes = {1: -number, 0: 1}
    assert blame(errors=[raised(0, "ConnectionError")], silent=[1], exit_codes=codes) == ("RankDied", 1)


def test_a_rank_that_exits_silently_outranks_its_peers_exceptions() -> None:
    assert blame(errors=[raised(0, "ConnectionError")], silent=[1], exit_codes={1: 3, 0: 1}) == ("RankDied", 1)


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGTERM])
def test_an_abort_in_the_wake_of_an_exception_does_not(number: signal.Signals) -> None:
    assert blame(errors=[raised(0)], silent=[1], exit_codes={1: -number, 0: 1}) == ("ValueError", 0)


def test_among_silent_deaths_the_telling_one_counts() -> None:
    assert blame(silent=[0, 1], exit_codes={0: -signal.SIGABRT, 1: -signal.SIGSEGV}) == ("RankDied", 1)


def test_ranks_that_never_greeted_are_known_from_torchrun() -> None:
    outcome = judge(
        Evidence("exited", 1, exit_codes={0: -signal.SIGTERM, 1: 1}, launcher_tail=["ImportError: no module named x"])
    )
    assert outcome.error is not None
    assert (outcome.error.type, outcome.error.rank) == ("RankDied", 1)
    assert "ImportError" in outcome.error.message


def test_a_launcher_that_fails_alone_is_quoted() -> None:
    outcome = judge(Evidence("exited", 2, launcher_tail=["", "RendezvousTimeoutError"]))
    assert outcome.error is not None
    assert outcome.error.type == "LaunchFailed"
    assert outcome.error.message.endswith("RendezvousTimeoutError")


def test_exit_code_0_without_a_result_is_a_failure_where_rank_0_ran() -> None:
    assert blame(cause="exited", launcher_code=0, result_missing=True) == ("NoResult", None)
    assert judge(Evidence("exited", 0)).status == "succeeded"
    assert judge(Evidence("exited", 0, result={"loss": 1.0})).result == {"loss": 1.0}


@pytest.mark.parametrize(
    ("cause", "error"),
    [
        ("timeout", "TimeoutExceeded"),
        ("terminated", "SupervisorTerminated"),
        ("fenced", "LeaseLost"),
        ("fault", "SupervisorFault"),
    ],
)
def test_reasons_from_outside_hide_what_the_ranks_did_on_the_way(cause: str, error: str) -> None:
    seen: dict[str, Any] = {"errors": [raised(0)], "silent": [1], "exit_codes": {1: -9}, "timeout_s": 1.0}
    assert blame(cause=cause, **seen) == (error, None)
    assert judge(Evidence("stop", 1, errors=[raised(0)])).status == "stopped"
    assert judge(Evidence("interrupted", 1, errors=[raised(0)])).status == "interrupted"


codes = st.dictionaries(st.integers(0, 3), st.integers(-64, 255).filter(bool), max_size=4)


@given(codes, st.lists(st.integers(0, 3), max_size=3), st.lists(st.integers(0, 3), unique=True), st.integers(0, 9000))
def test_a_failure_always_has_a_type_and_a_bounded_message(
    exit_codes: dict[int, int], errors: list[int], silent: list[int], said: int
) -> None:
    outcome = judge(
        Evidence(
            "rank_failed",
            1,
            exit_codes=exit_codes,
            errors=[raised(rank) for rank in errors],
            silent=silent,
            launcher_tail=["x" * said],
        )
    )
    assert outcome.status == "failed"
    assert outcome.error is not None
    assert outcome.error.type
    assert len(outcome.error.message) <= 4000
    assert outcome.error.rank in {*errors, *silent, None}
