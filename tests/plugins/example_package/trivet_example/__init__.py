"""Gated residual networks, rings of points, the multi-class hinge loss, and an allocator to be compiled."""
