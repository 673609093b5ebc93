"""Defines job specs: those of the built-in kinds, and the fields that every kind has."""
