"""Runs the compile-check job: is ``torch.compile`` safe for this program, and is it worth it.

``job`` climbs a ``ladder`` of rungs in each phase, on a GPU in processes of its own (``climbers``). A rung runs
(``run``) a program (``program``) compiled beside its uncompiled baseline, while ``monitor`` notes what the compiler
did and what became of results; ``detectors`` judge what was seen. ``diagnosis`` investigates a failed rung,
``selftest`` proves the detectors, and ``report`` publishes the gate that a training job names. ``ranks`` lets a group
come to one verdict; ``instruments`` alone touches what PyTorch does not document.
"""
