"""Runs the process that owns one attempt on this host: its group of ranks, its lease, its events, its outcome."""
