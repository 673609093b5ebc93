"""Defines jobs, from a spec to a record: their specs, their storage and their checks.

``spec`` has the fields of each kind, ``checks`` and ``submission`` the checks of a submission, ``kinds`` and
``plugins`` the kinds of jobs and the additions of packages, ``records`` and ``states`` the records of a job, ``store``
the broker's data and scripts, ``events`` the reports of a job. Nothing here imports torch.
"""
