"""Branch and bound over a model's inputs or activations, with the attack before it: :mod:`.driver` decides a query.

What both searches share: :mod:`.specification` is what a counterexample must satisfy, :mod:`.model` what is searched
and what confirms a counterexample, :mod:`.attack` looks for one by gradients, :mod:`.heuristics` score where to split,
:mod:`.time_plan` divides the time, :mod:`.settings` has every other number, :mod:`.search_group` lets ranks search
together, :mod:`.decision` is what a search reports.

:mod:`.inputs` splits boxes, and clips them. :mod:`.activations` splits at hidden values; its tighter bounds
where the property fails are :mod:`.invprop`, its linear programs :mod:`.lp`.
"""
