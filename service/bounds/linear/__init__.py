"""Propagates linear bounds backward: one traversal, by arithmetic, representation of rows and sharding."""
