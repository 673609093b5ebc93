"""Runs jobs on hosts: an agent per host, a supervisor per part of an attempt, behind it a launcher and ranks.

``agent`` places, dispatches and reaps for the fleet and starts supervisors; ``supervisor`` runs one part from its claim
to its report; ``launcher`` is torchrun, confined; ``rank`` is the program of every rank. What supervisor and ranks say
to each other is in ``event_protocol``.
"""
