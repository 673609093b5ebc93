"""Branch and bound over activations (β-CROWN, Wang et al., 2021): a subproblem is a set of halfspaces."""
