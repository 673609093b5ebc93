"""Results that one process makes for all: handed on whole, and made anew where they were not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from service.compilation.run import exchange
from service.compilation.run.exchange import FileExchange

NAME = "numbers"


@pytest.fixture
def shared() -> Iterator[FileExchange]:
    files = [os.memfd_create(name) for name in ("locks", NAME)]
    yield FileExchange(files[0], files[1:], [NAME])
    for file in files:
        os.close(file)


def in_another_process(act: Callable[[], Any]) -> int:
    """Return how a fork that does this ended."""
    pid = os.fork()
    if not pid:
        act()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def refuse() -> Any:
    raise AssertionError("made twice")


def test_a_result_is_made_by_the_first_process_and_taken_by_the_others(shared: FileExchange) -> None:
    weights = torch.arange(6, dtype=torch.float64).view(2, 3)
    made = {
        "weights": weights,
        "again": weights,
        "turned": weights.T,
        "none": torch.zeros(0, 2),
        "step": torch.tensor(3),
    }
    assert in_another_process(lambda: shared.obtain(NAME, lambda: made)) == 0
    found, is_own = shared.obtain(NAME, refuse)
    assert not is_own
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in made.items()}
    assert all(torch.equal(found[name], value) for name, value in made.items())
    assert found["weights"].data_ptr() == found["again"].data_ptr()
    found["weights"].zero_()  # its own from here on
    assert torch.equal(shared.obtain(NAME, refuse)[0]["weights"], weights)


def test_a_result_whose_process_ends_before_it_is_written_is_made_by_the_next(
    shared: FileExchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_half(file: int, result: Any) -> None:
        os.ftruncate(file, 64)
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(exchange, "_write", write_half)
        assert in_another_process(lambda: shared.obtain(NAME, lambda: 1)) == -signal.SIGKILL
    assert shared.obtain(NAME, lambda: 2) == (2, True)
    assert shared.obtain(NAME, refuse) == (2, False)


def test_an_error_is_the_maker_s_own(shared: FileExchange) -> None:
    with pytest.raises(AssertionError, match="made twice"):
        shared.obtain(NAME, refuse)
    assert shared.obtain(NAME, lambda: 2) == (2, True)


def test_a_result_that_is_too_large_is_made_by_each(shared: FileExchange, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_SHARE", 0.0)
    assert [shared.obtain(NAME, lambda: 8) for _ in range(2)] == [(8, True)] * 2


def test_a_result_that_cannot_be_pickled_is_made_by_each(shared: FileExchange) -> None:
    unnamed = {"key": lambda: 8}
    assert [shared.obtain(NAME, lambda: unnamed) for _ in range(2)] == [(unnamed, True)] * 2


def test_a_process_does_what_it_has_to_do_while_another_makes_the_result(shared: FileExchange) -> None:
    done: list[str] = []
    shared.obtain(NAME, lambda: 1, lambda: done.append("the maker"))
    (is_held, holds), (may_end, ends) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        with exchange.locked(shared.locks, 1):
            os.write(holds, b"1")
            os.read(may_end, 1)
        os._exit(0)
    os.read(is_held, 1)

    def meanwhile() -> None:
        done.append("the one that waits")
        os.write(ends, b"1")

    assert shared.obtain(NAME, refuse, meanwhile) == (1, False)
    assert done == ["the one that waits"]
    assert os.waitpid(pid, 0)[1] == 0
