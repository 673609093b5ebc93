"""Defines jobs, from a spec to a record: what they are, where they are kept, and what is checked of them.

``spec`` has the fields of each kind, ``checks`` and ``submission`` what is refused at submission, ``kinds`` and
``plugins`` what packages add, ``records`` and ``states`` what is told of a job, ``store`` the broker's data and
scripts, ``events`` what a job reports. Nothing here imports torch.
"""
