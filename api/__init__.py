"""Serves REST, event streams and the dashboard; starts without torch.

``main`` assembles the application, ``routes`` has one module per resource, ``stream`` and ``sse`` fan events out,
``errors`` maps exceptions to statuses, and ``problems`` writes the answers.
"""
