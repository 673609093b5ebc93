"""The compile-check job: is ``torch.compile`` safe for this model, and is it worth it.

A ladder of rungs (``rungs``) is climbed per phase; each rung is run beside an uncompiled reference (``reference``),
observed (``observe``), judged by detectors (``detectors``) and, if it passes, opens the gate (``gate``) that a
training job names.
"""
