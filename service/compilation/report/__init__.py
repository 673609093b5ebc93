"""Publishes the results of a compile check: the gate, the summary, and a row for every rung."""
