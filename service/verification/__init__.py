"""Verification jobs: bounds of a model's outputs, verdicts on properties, and searches for what bounds leave open.

:mod:`.job` is the program of each rank. :mod:`.load` makes its tasks from the spec, :mod:`.properties` the instances of
each, :mod:`.engine` is what bounds a model. :mod:`.certify` gives verdicts from one batch of bounds, and looks at the
witnesses by :mod:`.counterexamples`; :mod:`.search_runner` hands what is left open to :mod:`.bab`, which attacks it and
splits it. :mod:`.results` makes the rows and keeps them for a later attempt.
"""
