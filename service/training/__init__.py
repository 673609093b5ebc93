"""Trains a model on a mesh.

``job`` is the program of every rank: ``setup`` builds what trains, in named steps, ``loop`` takes the steps with
``engine``, and ``optimizers`` has what updates parameters.
"""
