"""Runs programs, uncompiled and compiled, and compares what they compute.

To be read in this order: ``built_program`` is a program ready to run, and ``recorded_run`` takes it through its
iterations. ``baseline`` makes the uncompiled runs, and out of them an oracle (``oracles``) for each tensor; processes
that climb the same phase hand it on by ``exchange``. ``observe_rung`` runs the compiled program under watch.
``assessment`` compares it (``compare_runs``) by the rule of ``parity``, and looks for causes of a difference that are
no fault: ``distribution``, ``kinks``. ``audit`` looks for agreement by chance. ``cost`` times both, and ``observation``
holds everything that was seen.
"""
