"""Runs the process that owns one attempt on this host: its group of ranks, its lease, its events, its outcome.

``program`` is the process and ``attempt`` one part in it, which the other modules serve:

- from order to ranks: ``settings``, ``lease`` (``claim``), ``attempt_folder``, ``job_policy``, ``command``, ``group``,
  ``keeper``;
- staying alive: ``lease`` renews, and waits through an outage;
- ending: ``first_cause`` takes the first cause, ``stall_watch`` notices ranks that hang, ``attempt`` gives ranks
  their grace (``_end_group``) and limits their time, ``outcome`` decides how the part ended and whose fault it was;
- output of ranks: ``rank_socket``, ``logs``, ``collector``;
- reports to the store: ``uploader`` (events), ``publisher`` (artifacts), ``attempt_folder`` (a gate's artifacts).

Periods and amounts are in ``settings``; those of an operator come with the order.
"""
