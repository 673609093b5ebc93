"""Branch and bound over boxes of inputs, for networks with few inputs.

:mod:`.search` goes round by round: it takes :mod:`.boxes` from their pool, bounds them by the planes of
:mod:`.input_bounds`, clips and attacks those that stay open, and splits them.
"""
