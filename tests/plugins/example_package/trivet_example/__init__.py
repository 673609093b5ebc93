"""Gated residual networks, rings of points, the multi-class hinge loss, a program to compile, and a kind of job."""
