"""Runs scripts of jobs' authors on the ranks of a job."""
