"""Records what is seen of a run: what the compiler did, and how the program called its compiled modules and kept
results.
"""
