"""Which disjuncts begin anew after shared bounds became tighter: those whose new tree is expected to be smaller."""

from __future__ import annotations

from math import inf, nan

import pytest

from service.verification.bab.activations.restarts import is_fresh_tree_smaller


@pytest.mark.parametrize(
    ("root", "began", "reached", "open_", "expected"),
    [
        (-1.0, -10.0, -2.0, 1, True),  # a better margin than all splits gave
        (-2.0, -10.0, -2.0, 1, False),
        (-6.0, -10.0, -2.0, 101, True),  # half of the gain by 11 of 101 domains
        (-6.0, -10.0, -2.0, 99, False),
        (-10.0, -10.0, -2.0, 10**6, False),
        (-11.0, -10.0, -2.0, 10**6, False),
        (-5.0, -10.0, -10.0, 1, True),
        (nan, -10.0, -2.0, 10**6, False),
        (-5.0, -inf, -2.0, 10**6, False),
        (-5.0, -10.0, inf, 1, False),
    ],
)
def test_a_tree_starts_over_where_a_new_one_is_a_tenth(
    root: float, began: float, reached: float, open_: int, expected: bool
) -> None:
    assert is_fresh_tree_smaller(root, began, reached, open_) is expected
