"""The table of moves: terminal states are final, and every state can be reached and left as documented."""

from __future__ import annotations

from service.jobs.spec.common import ACTIVE, MOVES, STATES, TERMINAL


def test_only_a_retry_leaves_a_terminal_state() -> None:
    assert {state: MOVES[state] for state in TERMINAL} == {
        "succeeded": frozenset(),
        "failed": frozenset({"queued"}),
        "cancelled": frozenset({"queued"}),
    }


def test_every_state_is_reached_from_queued_and_leads_to_an_end() -> None:
    reached, frontier = {"queued"}, {"queued"}
    while frontier:
        frontier = {after for state in frontier for after in MOVES[state]} - reached  # type: ignore[index]
        reached |= frontier
    assert reached == set(STATES)
    assert set(STATES) == TERMINAL | ACTIVE | {"queued"}
