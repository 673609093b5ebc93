"""Which variables of a function are read again, from where it stands."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import pytest

from service.parallel.boundary.holders import is_read_again

Asked = list[bool]


def asks(found: Asked, name: str = "x") -> None:
    frame = sys._getframe(1)
    found.append(is_read_again(frame.f_code, frame.f_lasti, name))


def set_anew_in_a_loop(found: Asked) -> None:
    for value in range(1):
        asks(found)
        x = value
        asks(found)
        print(x)
        asks(found)


def set_anew_within_a_context(found: Asked) -> None:
    for value in range(1):
        with contextlib.nullcontext():
            asks(found)
            x = value
        asks(found)
        print(x)
        asks(found)


def read_in_one_branch(found: Asked) -> None:
    x = 0
    for value in range(1):
        asks(found)
        if value > 100:
            print(x)
        asks(found)
        x = value
        asks(found)


def read_by_a_handler(found: Asked) -> None:
    x = 1
    asks(found)
    try:
        asks(found)
        x = int(str(x))
    except ValueError:
        print(x)
    asks(found)


def read_by_an_inner_function(found: Asked) -> None:
    x = 1
    asks(found)
    inner = lambda: x  # noqa: E731 - as people write it
    asks(found)
    inner()


def deleted(found: Asked) -> None:
    x = 1
    asks(found)
    del x
    x = 2
    print(x)


def read_by_any_name(found: Asked) -> None:
    x = 1
    asks(found)
    print(locals())


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (set_anew_in_a_loop, [False, True, False]),
        (set_anew_within_a_context, [False, True, False]),
        (read_in_one_branch, [True, False, True]),
        (read_by_a_handler, [True, True, False]),
        (read_by_an_inner_function, [True, False]),
        (deleted, [False]),
        (read_by_any_name, [True]),
    ],
)
def test_a_variable_counts_while_some_way_reads_it_before_it_is_set(
    function: Callable[[Asked], None], expected: Asked
) -> None:
    found: Asked = []
    function(found)
    assert found == expected


def test_a_generator_that_waits_is_asked_where_it_waits() -> None:
    def steps() -> Iterator[int]:
        while True:
            x = 1
            yield 0
            yield x

    generator = steps()
    frame = generator.gi_frame
    assert not is_read_again(frame.f_code, frame.f_lasti, "x")
    for expected in (True, False, True):
        next(generator)
        assert is_read_again(frame.f_code, frame.f_lasti, "x") == expected
