"""Decides queries by branch and bound over a model's inputs or activations, after an attack: :mod:`.driver` decides a
query.

Both searches share :mod:`.specification`, the conditions of a counterexample; :mod:`.model`, the searched model and the
check of counterexamples; :mod:`.attack`, which searches for one by gradients; :mod:`.heuristics`, which score splits;
:mod:`.time_plan`, which divides the time; :mod:`.settings`, every other number; :mod:`.search_group`, by which ranks
search together; and :mod:`.decision`, the reports of a search.

:mod:`.inputs` splits boxes, and clips them. :mod:`.activations` splits at hidden values; :mod:`.invprop` gives
tighter bounds where the property fails, and :mod:`.lp` its linear programs.
"""
