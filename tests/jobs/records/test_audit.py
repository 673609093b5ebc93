"""The chain of the audit log: whatever is done to a copy of it is noticed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.jobs.records.audit import AuditEntry, AuditHead, AuditRecord, BrokenChain, chained, digest, verify_chain

RECORDS = [AuditRecord(action="job.cancel", actor="ann", job=f"job_{index}") for index in range(5)]


def lines(records: list[AuditRecord] | None = None) -> list[bytes]:
    return [entry.line for entry in chained(records or RECORDS, AuditHead(), datetime(2026, 1, 1, tzinfo=UTC))]


_text = st.text(st.characters(codec="utf-8"), max_size=20)
_records = st.builds(
    AuditRecord, action=st.just("key.create"), actor=_text, address=_text, job=st.none() | _text, subject=_text,
    detail=st.dictionaries(_text, _text, max_size=3),
)  # fmt: skip


@given(st.lists(_records, min_size=1, max_size=6), st.integers(0, 5))
def test_an_untouched_chain_verifies_from_any_entry_on(records: list[AuditRecord], start: int) -> None:
    whole = lines(records)
    start = min(start, len(whole) - 1)
    found = verify_chain(whole[start:])
    assert (found.first, found.entries, found.head.number) == (start + 1, len(whole) - start, len(whole))
    assert [AuditEntry.model_validate_json(line).line for line in whole] == whole


def changed(line: bytes, rehash: bool = False, **fields: object) -> bytes:
    entry = {**orjson.loads(line), **fields}
    if rehash:
        entry["hash"] = digest(entry)
    return orjson.dumps(entry)


EDITS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "another actor": lambda whole: [*whole[:2], changed(whole[2], actor="bob"), *whole[3:]],
    "another actor, and its hash": lambda whole: [*whole[:2], changed(whole[2], rehash=True, actor="bob"), *whole[3:]],
    "another time": lambda whole: [*whole[:2], changed(whole[2], time="2020-01-01T00:00:00.000Z"), *whole[3:]],
    "a further field": lambda whole: [*whole[:2], changed(whole[2], note="x"), *whole[3:]],
    "removed": lambda whole: [*whole[:2], *whole[3:]],
    "removed and renumbered": lambda whole: [*whole[:2], changed(whole[3], rehash=True, number=3)],
    "the last renumbered": lambda whole: [*whole[:4], changed(whole[4], rehash=True, number=7)],
    "doubled": lambda whole: [*whole[:3], whole[2], *whole[3:]],
    "exchanged": lambda whole: [whole[0], whole[2], whole[1], *whole[3:]],
    "the first replaced": lambda whole: [changed(whole[0], rehash=True, actor="bob"), *whole[1:]],
    "torn": lambda whole: [*whole[:2], whole[2][:20], *whole[3:]],
    "no entry": lambda whole: [*whole[:2], b"[]", *whole[3:]],
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_is_noticed(edit: Callable[[list[bytes]], list[bytes]]) -> None:
    with pytest.raises(BrokenChain):
        verify_chain(edit(lines()))


def test_a_chain_that_was_made_anew_is_noticed_by_a_head_that_was_noted() -> None:
    whole = lines()
    heads = [AuditHead(number=entry["number"], hash=entry["hash"]) for entry in map(orjson.loads, whole)]
    forged = lines([RECORDS[0], RECORDS[1].model_copy(update={"actor": "bob"}), *RECORDS[2:]])
    assert verify_chain(whole, heads).head == heads[-1]
    assert verify_chain(whole[2:], heads).first == 3
    assert verify_chain(forged, heads[:1]).entries == 5
    with pytest.raises(BrokenChain, match="entry 5 is not the one that was noted"):
        verify_chain(forged, heads[-1:])


def test_a_missing_end_is_noticed_by_a_head_that_was_noted() -> None:
    whole = lines()
    newest = verify_chain(whole).head
    with pytest.raises(BrokenChain, match="entry 5 was noted and is missing"):
        verify_chain(whole[:-1], [newest])
    with pytest.raises(BrokenChain, match="missing"):
        verify_chain([], [newest])


def test_an_empty_log_is_whole() -> None:
    found = verify_chain([], [AuditHead()])
    assert (found.entries, found.head) == (0, AuditHead())


def test_long_details_are_shortened() -> None:
    (entry,) = chained([AuditRecord(action="job.submit", actor="ann", detail={"name": "x" * 10_000})], AuditHead())
    assert len(entry.line) < 1000
