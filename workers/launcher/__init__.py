"""Runs torchrun, which waits for its order and is confined before it starts ranks."""
