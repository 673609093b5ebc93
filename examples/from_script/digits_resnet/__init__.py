"""The network and the loop of ``examples/script``, as a package that the operator installs."""
