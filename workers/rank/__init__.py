"""Runs the program of every rank, up to the call of the job's kind."""
