"""Holds all use of undocumented PyTorch, one file per concern, each with a fallback if one exists."""
