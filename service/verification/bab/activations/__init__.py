"""Branch and bound over activations (β-CROWN, Wang et al., 2021): a subproblem is a set of halfspaces, a domain.

:mod:`.search` goes round by round: it takes :mod:`.domains` from their pool, splits them by :mod:`.branching` and
bounds the halves by :mod:`.domain_bounds`. Before the first round :mod:`.root_bounds` bounds the whole box; in between,
:mod:`.intermediate_bounds` and :mod:`.intermediate_bab` tighten what all domains share.

The bound of a domain is a :mod:`.dual_objective` of slope parameters, multipliers and row weights, which
:mod:`.optimiser` maximises, on a CUDA device from a record (:mod:`.recorded_optimisation`). :mod:`.certificates` bound
it once more in real arithmetic. :mod:`.neuron_index` and :mod:`.staged_objective` are for models that are divided over
tensor-parallel ranks and pipeline stages.
"""
