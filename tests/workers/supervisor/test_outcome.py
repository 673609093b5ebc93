"""Whose fault it was: rules over what a supervisor saw."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.jobs.events import ErrorEvent
from workers.supervisor.outcome import Evidence, judge, may_be_aftermath, may_be_the_end_of_all

WHOLE = {"completed": {"done": 3, "total": 3, "unit": "steps"}}
GONE = "Connection closed by peer [127.0.0.1]:4711"


def raised(rank: int, error: str = "ValueError", *, time: float = 0.0, message: str = "no") -> ErrorEvent:
    return ErrorEvent(type="error", time=time, rank=rank, error=error, message=message, traceback="…")


def blame(**fields: Any) -> tuple[str, int | None]:
    outcome = judge(Evidence(**{"cause": "rank_failed", "launcher_code": 1, **fields}))
    assert outcome.status == "failed"
    assert outcome.error is not None
    return outcome.error.type, outcome.error.rank


def test_the_first_exception_by_time_counts_whichever_arrived_first() -> None:
    errors = [raised(0, "ConnectionError", time=2.0), raised(2, time=1.0)]
    assert blame(errors=errors) == blame(errors=errors[::-1]) == ("ValueError", 2)


def test_a_refusal_has_no_traceback_to_look_at() -> None:
    for traceback, artifact in (("…", "errors/attempt-1-rank-2.txt"), ("", None)):
        error = judge(Evidence("rank_failed", 1, errors=[{**raised(2), "traceback": traceback}])).error
        assert error is not None
        assert error.traceback_artifact == artifact


def test_what_would_fail_again_is_said_to() -> None:
    for final in (False, True):
        error = judge(Evidence("rank_failed", 1, errors=[{**raised(2), "final": final}])).error
        assert error is not None
        assert error.final == final


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS])
def test_a_rank_that_was_killed_outranks_its_peers_exceptions(number: signal.Signals) -> None:
    codes = {1: -number, 0: 1}
    assert blame(errors=[raised(0, "ConnectionError")], silent={1: 9.0}, exit_codes=codes) == ("RankDied", 1)


def test_a_rank_that_exits_silently_outranks_its_peers_exceptions() -> None:
    assert blame(errors=[raised(0)], silent={1: 9.0}, exit_codes={1: 3, 0: 1}) == ("RankDied", 1)


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGTERM])
def test_an_abort_in_the_wake_of_an_exception_does_not(number: signal.Signals) -> None:
    assert blame(errors=[raised(0)], silent={1: 9.0}, exit_codes={1: -number, 0: 1}) == ("ValueError", 0)


def test_an_abort_that_came_first_does() -> None:
    errors, codes = [raised(0, "RuntimeError", time=5.0, message=GONE)], {1: -signal.SIGABRT, 0: 1}
    assert blame(errors=errors, silent={1: 9.0}, exit_codes=codes) == ("RankDied", 1)
    assert blame(errors=[raised(0, time=5.0)], silent={1: 4.0}, exit_codes=codes) == ("RankDied", 1)


def test_among_silent_deaths_the_telling_one_counts() -> None:
    codes = {0: -signal.SIGABRT, 1: -signal.SIGSEGV}
    assert blame(silent={0: 1.0, 1: 2.0}, exit_codes=codes) == ("RankDied", 1)


def test_sigterm_that_nobody_asked_for_is_named() -> None:
    errors = [raised(0, "RuntimeError", time=5.0, message=GONE)]
    error = judge(Evidence("rank_failed", 1, errors=errors, terminated={1: 4.0}, exit_codes={0: 1, 1: 143})).error
    assert error is not None
    assert (error.type, error.rank) == ("RankDied", 1)
    assert "SIGTERM, which the service did not send" in error.message


def test_sigterm_by_which_torchrun_ends_the_others_is_not_the_cause() -> None:
    assert blame(errors=[raised(0, time=5.0)], terminated={1: 5.1}, exit_codes={0: 1, 1: 143}) == ("ValueError", 0)
    assert blame(silent={0: 5.2}, terminated={1: 5.1}, exit_codes={0: 3, 1: 143}) == ("RankDied", 0)


@pytest.mark.parametrize(
    ("kills", "said"),
    [(0, "out-of-memory killer is the usual sender"), (1, "ended 1 process here"), (2, "ended 2 processes here")],
)
def test_sigkill_that_was_not_ours_points_at_the_memory(kills: int, said: str) -> None:
    error = judge(Evidence("rank_failed", 1, silent={1: 1.0}, exit_codes={1: -signal.SIGKILL}, oom_kills=kills)).error
    assert error is not None
    assert "killed by SIGKILL; the kernel's out-of-memory killer" in error.message
    assert said in error.message


@pytest.mark.parametrize(
    ("evidence", "may_be"),
    [
        (Evidence("rank_failed", 1, silent={1: 1.0}, exit_codes={1: -signal.SIGKILL}), True),
        (Evidence("exited", 128 + signal.SIGKILL), True),
        (Evidence("rank_failed", 1, silent={1: 1.0}, exit_codes={1: -signal.SIGKILL}, oom_kills=1), False),
        (Evidence("rank_failed", 1, silent={1: 1.0}, exit_codes={1: -signal.SIGSEGV}), False),
        (Evidence("stop", 1, exit_codes={1: -signal.SIGKILL}), False),
    ],
)
def test_sigkill_may_be_the_end_of_all_that_runs_here(evidence: Evidence, may_be: bool) -> None:
    assert may_be_the_end_of_all(evidence) is may_be


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


def test_a_launcher_that_was_killed_is_the_cause_of_its_ranks_end() -> None:
    seen: dict[str, Any] = {"silent": {0: 1.0, 1: 1.0}, "errors": [raised(1, "RuntimeError", message=GONE)]}
    assert blame(launcher_code=128 + signal.SIGKILL, **seen) == ("LaunchFailed", None)
    assert blame(launcher_code=None, **seen) == ("RankDied", 0)


def test_a_launcher_that_passed_its_signal_on_is_named_with_it_and_no_rank_is_blamed() -> None:
    seen: dict[str, Any] = {"terminated": {0: 1.0, 1: 2.0}, "silent": {1: 2.1}}
    outcome = judge(Evidence("rank_failed", 128 + signal.SIGTERM, **seen))
    assert outcome.error is not None
    assert (outcome.error.type, outcome.error.rank) == ("LaunchFailed", None)
    assert "torchrun was ended by SIGTERM" in outcome.error.message
    assert blame(launcher_code=128 + signal.SIGKILL, **seen) == ("RankDied", 0), "it was not killed for that"
    interrupted: dict[str, Any] = {"errors": [raised(1, "KeyboardInterrupt"), raised(0, "KeyboardInterrupt")]}
    assert blame(launcher_code=128 + signal.SIGINT, **interrupted) == ("LaunchFailed", None)
    failed = {**seen, "errors": [raised(1, "ValueError", time=0.5)]}
    assert blame(launcher_code=128 + signal.SIGTERM, **failed) == ("ValueError", 1)


def test_a_keeper_that_was_killed_is_no_fault_of_the_job() -> None:
    outcome = judge(Evidence("exited", -signal.SIGKILL, silent={0: 1.0}))
    assert (outcome.status, outcome.error and outcome.error.type) == ("lost", "KeeperEnded")


def test_ranks_that_hang_are_named_with_the_place() -> None:
    both = judge(Evidence("stalled", None, stall_s=60.0, hanging={1: "recv (socket.py:1)", 0: "load (data.py:7)"}))
    assert both.error is not None
    assert (both.error.type, both.error.rank) == ("Stalled", None)
    assert "stall_s = 60 s: rank 0 is at load (data.py:7); rank 1 is at recv (socket.py:1)" in both.error.message
    assert both.error.traceback_artifact == "errors/attempt-1-rank-0.txt"
    assert blame(cause="stalled", stall_s=1.0, hanging={2: "x"}) == ("Stalled", 2)


def test_success_takes_a_result_of_all_the_work_and_every_ranks_word() -> None:
    whole: dict[str, Any] = {"cause": "exited", "launcher_code": 0, "ranks": 2, "done": 2, "leads": True}
    assert judge(Evidence(**whole, result={"loss": 1.0, **WHOLE})).result == {"loss": 1.0}
    assert blame(**whole) == ("NoResult", 0)
    assert blame(**whole, result={"loss": 1.0}) == ("NoResult", 0)
    assert blame(**{**whole, "done": 1}, result=WHOLE) == ("Incomplete", None)
    assert judge(Evidence(**{**whole, "leads": False})).status == "succeeded"


@pytest.mark.parametrize("unit", ["steps", "instances", "rungs"])
def test_work_that_ended_early_without_a_request_is_no_success(unit: str) -> None:
    result = {"completed": {"done": 36, "total": 3000, "unit": unit}}
    error = judge(Evidence("exited", 0, leads=True, result=result)).error
    assert error is not None
    assert error.type == "Incomplete"
    assert f"36 of 3000 {unit}" in error.message


@pytest.mark.parametrize(
    ("cause", "status", "error"),
    [
        ("timeout", "failed", "TimeoutExceeded"),
        ("terminated", "lost", "SupervisorTerminated"),
        ("lease_expired", "lost", "LeaseLost"),
        ("fault", "lost", "SupervisorFault"),
    ],
)
def test_reasons_from_outside_hide_what_the_ranks_did_on_the_way(cause: Any, status: str, error: str) -> None:
    seen: dict[str, Any] = {"errors": [raised(0)], "silent": {1: 1.0}, "exit_codes": {1: -9}, "timeout_s": 1.0}
    outcome = judge(Evidence(cause, 1, **seen))
    assert outcome.error is not None
    assert (outcome.status, outcome.error.type, outcome.error.rank) == (status, error, None)
    assert judge(Evidence("stop", 1, errors=[raised(0)])).status == "stopped"
    assert judge(Evidence("interrupted", 1, errors=[raised(0)])).status == "interrupted"


@pytest.mark.parametrize("message", [GONE, "SO_ERROR: No route to host", "Read error [::1]:9: Connection timed out"])
def test_what_may_have_come_from_another_host_of_a_gang(message: str) -> None:
    echo = raised(0, "RuntimeError", message=message)
    assert may_be_aftermath(Evidence("rank_failed", 1, errors=[echo]))
    assert may_be_aftermath(Evidence("exited", 1, terminated={0: 1.0}))
    assert not may_be_aftermath(Evidence("rank_failed", 1, errors=[echo, raised(1)]))
    assert not may_be_aftermath(Evidence("rank_failed", 1, errors=[echo], silent={1: 1.0}, exit_codes={1: -9}))
    assert not may_be_aftermath(Evidence("timeout", None, errors=[echo]))


codes = st.dictionaries(st.integers(0, 3), st.integers(-64, 255).filter(bool), max_size=4)
moments = st.floats(0, 1e9)


@given(
    st.builds(
        Evidence,
        st.just("rank_failed"),
        st.none() | st.integers(0, 255),
        exit_codes=codes,
        errors=st.lists(st.builds(raised, st.integers(0, 3), time=moments), max_size=3),
        silent=st.dictionaries(st.integers(0, 3), moments),
        terminated=st.dictionaries(st.integers(0, 3), moments),
        launcher_tail=st.integers(0, 9000).map(lambda said: ["x" * said]),
    )
)
def test_a_failure_always_has_a_type_and_a_bounded_message(seen: Evidence) -> None:
    outcome = judge(seen)
    assert outcome.status == "failed"
    assert outcome.error is not None
    assert outcome.error.type
    assert len(outcome.error.message) <= 4000
    assert outcome.error.rank in {*(error["rank"] for error in seen.errors), *seen.silent, *seen.terminated, None}


DEADLY = [-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGFPE, 1, 3]
"""Exit codes of ranks that end without a word for a reason of their own."""


@st.composite
def failures(draw: st.DrawFn) -> tuple[int, Evidence]:
    """A rank that fails at second 100, and what a supervisor may see of it and of the others, in any order: exceptions
    that say a peer is gone, aborts, torchrun's SIGTERM, ends that are noticed late, exit codes that never come.
    """
    ranks = draw(st.integers(2, 5))
    culprit = draw(st.integers(0, ranks - 1))
    how = draw(st.sampled_from(["raises", "gets SIGTERM", "dies", "dies, and its code never comes"]))
    errors, silent, terminated, codes = [], {}, {}, {}
    if how == "raises":
        errors.append(raised(culprit, time=100.0))
    elif how == "gets SIGTERM":
        terminated[culprit] = 100.0
    else:
        silent[culprit] = 100.0 + draw(st.floats(0, 60))
        if how == "dies":
            codes[culprit] = draw(st.sampled_from(DEADLY))
    for rank in set(range(ranks)) - {culprit}:
        wake = draw(st.sampled_from(["raises", "aborts", "gets SIGTERM", "is killed from here", "is done"]))
        later = 100.1 + draw(st.floats(0, 60))
        if wake == "raises":
            message = "no" if how in ("raises", "gets SIGTERM", "dies") and draw(st.booleans()) else GONE
            errors.append(raised(rank, "RuntimeError", time=later, message=message))
        elif wake == "aborts" and how != "dies, and its code never comes":
            silent[rank], codes[rank] = later, -signal.SIGABRT
        elif wake == "gets SIGTERM" and how != "dies, and its code never comes":
            terminated[rank] = later
    seen = Evidence(
        draw(st.sampled_from(["exited", "rank_failed"])),
        draw(st.sampled_from([None, 1])),
        exit_codes=codes,
        errors=draw(st.permutations(errors)),
        silent=dict(draw(st.permutations(list(silent.items())))),
        terminated=dict(draw(st.permutations(list(terminated.items())))),
    )
    return culprit, seen


@given(failures())
def test_the_rank_that_failed_first_is_named_in_whatever_order_ends_are_seen(failure: tuple[int, Evidence]) -> None:
    culprit, seen = failure
    error = judge(seen).error
    assert error is not None
    assert error.rank == culprit
