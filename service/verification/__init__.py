"""Runs verification jobs: bounds a model's outputs, decides properties, and searches where bounds leave them open.

:mod:`.job` is the program of each rank. :mod:`.load` makes its tasks from the spec, :mod:`.properties` makes
the instances of each, and :mod:`.engine` bounds a model. :mod:`.certify` gives verdicts from one batch of
bounds, and evaluates the witnesses by :mod:`.counterexamples`. :mod:`.search_runner` hands open instances to
:mod:`.bab`, which attacks and splits them. :mod:`.results` makes the rows and keeps them for a later attempt.
"""
