"""Runs the worker of a host: places, dispatches, and starts supervisors."""
