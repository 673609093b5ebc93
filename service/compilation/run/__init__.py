"""Runs one rung of the ladder beside the uncompiled baseline, compares the two and times both."""
