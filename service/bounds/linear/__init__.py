"""Linear bounds propagated backward: one traversal, by arithmetic, representation of rows and sharding."""
