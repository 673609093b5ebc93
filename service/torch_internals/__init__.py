"""The one place that knows versions of torch: which were tried, and which of torch's private names Trivet uses.

Nothing here imports torch before it is asked for one of these names.
"""
