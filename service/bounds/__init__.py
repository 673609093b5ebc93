"""Bound propagation over traced graphs: what certifies a model, and what certified training minimises."""
