"""Records how a program called its compiled modules, and who kept their results."""
