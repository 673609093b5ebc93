"""Builds models that installed packages have by name: a file for each package, which only ranks import."""
