"""A corpus of small programs for the compile check: some with a bug, some sound."""
