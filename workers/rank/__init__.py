"""Runs the program of every rank, up to the kind of job that it runs."""
