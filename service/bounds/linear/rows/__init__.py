"""Representations of the rows that a backward traversal carries, one in each file; a dense tensor needs none."""
