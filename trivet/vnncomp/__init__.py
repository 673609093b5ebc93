"""Speaks the interface of VNN-COMP, the competition of neural network verifiers, and scores by its rules.

A source of the rules is the competition's own scoring, which checks every witness and counts points:
https://github.com/VNN-COMP/vnncomp2026_results, folder ``SCORING``, as of commit 5a9a564 (2026).
:mod:`.answers`, :mod:`.instances` and :mod:`.scoring` are plain data and arithmetic; :mod:`.witness` runs onnxruntime,
:mod:`.deciding` a job of the service or a rank of its own, :mod:`.series` a folder of benchmarks.
"""
