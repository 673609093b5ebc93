"""How bad a printed line is, by its words."""

from __future__ import annotations

import pytest

from service.jobs.events import is_at_least


@pytest.mark.parametrize(
    ("line", "warns", "fails"),
    [
        ("step 10: loss 0.5", False, False),
        ("UserWarning: lr_scheduler.step() was called early", True, False),
        ("WARN  retrying", True, False),
        ("[rank 1] ValueError: no", True, True),
        ("Traceback (most recent call last):", True, True),
        ("torch.OutOfMemoryError: CUDA out of memory", True, True),
        ("forewarned is no warning word here", True, False),
        ("errors are rare in mirrored terrors", False, False),
    ],
)
def test_a_line_is_as_bad_as_what_it_speaks_of(line: str, warns: bool, fails: bool) -> None:
    assert (is_at_least("warning", line), is_at_least("error", line)) == (warns, fails)
