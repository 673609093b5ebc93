"""Gated residual networks, rings of points, and the multi-class hinge loss."""
