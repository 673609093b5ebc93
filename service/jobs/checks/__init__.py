"""Checks at submission: everything about a spec that can be known before a device is touched, one file per concern.

A spec that passes pydantic is well-formed; these functions ask whether its parts fit each other, the jobs that it names
and the fleet. They are pure: the fleet, the other jobs and the uploaded files come with the context. The
declaration of each kind of job lists its checks (:mod:`service.jobs.kinds`).
"""
