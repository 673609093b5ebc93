"""The worker of a host: places, dispatches, and starts supervisors."""
