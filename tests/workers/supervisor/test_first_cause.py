"""What ends a part: the first of whatever happens, and the first error of the supervisor's own."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from workers.supervisor.first_cause import DiskThread, Ending, FirstCause


def test_a_second_fault_does_not_replace_the_first() -> None:
    async def work() -> tuple[Ending, str]:
        ending = FirstCause(lambda: False)
        ending.fail(ValueError("the cause"))
        ending.fail(RuntimeError("its consequence"))
        ending.fail(OSError(errno.ENOSPC, "full"), "disk_full", "the disk is full")
        return await ending.first(), ending.fault

    assert asyncio.run(work()) == ("fault", "ValueError: the cause")


def test_a_fault_after_another_ending_does_not_change_it() -> None:
    async def work() -> Ending:
        ending = FirstCause(lambda: False)
        ending.end("exited")
        ending.fail(ValueError("while it was reported"))
        ending.lose()
        assert ending.is_lost
        return await ending.first()

    assert asyncio.run(work()) == "exited"


def test_the_first_task_that_fails_is_the_fault_and_a_cancelled_one_is_none() -> None:
    async def fail(message: str) -> None:
        await asyncio.sleep(0)
        raise ValueError(message)

    async def work() -> tuple[Ending, str]:
        ending = FirstCause(lambda: False)
        cancelled = asyncio.create_task(asyncio.Event().wait())
        for task in (cancelled, asyncio.create_task(fail("first")), asyncio.create_task(fail("second"))):
            task.add_done_callback(ending.check)
        cancelled.cancel()
        return await ending.first(), ending.fault

    assert asyncio.run(work()) == ("fault", "ValueError: first")


@pytest.mark.parametrize(("is_over", "expected"), [(True, "lease_expired"), (False, "rank_failed")])
def test_a_rank_that_fails_after_the_lease_was_ended_by_it(is_over: bool, expected: Ending) -> None:
    async def work() -> Ending:
        ending = FirstCause(lambda: is_over)
        ending.end("rank_failed")
        return await ending.first()

    assert asyncio.run(work()) == expected


def test_what_fails_on_the_disk_ends_the_part(tmp_path: Path) -> None:
    async def work() -> tuple[Ending, str]:
        ending = FirstCause(lambda: False)
        disk = DiskThread(tmp_path, ending)

        def fail() -> None:
            raise OSError(errno.EIO, "unreadable")

        await disk.run(lambda: None)
        assert not ending.is_decided
        await disk.run(fail)
        disk.close()
        return await ending.first(), ending.fault

    assert asyncio.run(work()) == ("fault", "OSError: [Errno 5] unreadable")
