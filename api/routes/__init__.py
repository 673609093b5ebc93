"""One module per resource; each gives a ``router``."""
