"""Defines jobs, from a spec to a record: their specs, their storage and their checks.

``spec`` has the fields of each kind, ``checks`` and ``submission`` the checks of a submission, ``kinds`` and
``plugins`` the kinds of jobs and the additions of packages, ``records`` what is known of a job, ``store`` the broker's
data and scripts, ``queue`` the order of jobs, ``events`` the reports of a job, ``runtime`` what a rank has of the
service, ``files`` the data folder, ``host`` the machine, ``settings`` the operator's choices, ``accounts`` who may do
what, ``monitoring`` and ``tracing`` what is measured, ``text`` how text of others is shown. Nothing here imports torch.
"""
