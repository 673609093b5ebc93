"""Records how a program called its compiled modules, and which objects kept their results."""
