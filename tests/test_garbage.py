"""Work runs without the garbage collector where it asks for that, and only there."""

from __future__ import annotations

import contextlib
import gc

from service.garbage import uncollected


def test_the_collector_is_off_meanwhile_and_on_again_after_an_error() -> None:
    assert gc.isenabled()
    with contextlib.suppress(ImportError), uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled(), "what is within another leaves it off"
        raise ImportError
    assert gc.isenabled()
