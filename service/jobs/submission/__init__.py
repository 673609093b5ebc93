"""Checks a submitted spec as a whole, in the processes with limits that it runs in."""
