"""Spreads a model over ranks: the mesh, tensor parallelism, the pipeline's runtime, FSDP, checkpoints, and the boundary
of compiled calls.
"""
