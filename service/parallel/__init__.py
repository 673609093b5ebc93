"""Spreads a model over ranks: mesh, tensor parallelism, pipeline, FSDP, checkpoints, compiled calls' boundary."""
