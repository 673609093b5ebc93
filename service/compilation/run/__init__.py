"""Runs one rung of the ladder beside the uncompiled reference, compares the two and times both."""
