"""Declarative job specs: what the built-in kinds are asked in, and what every kind has."""
