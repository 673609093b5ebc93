"""Serves REST, event streams and the dashboard; starts without torch.

``main`` assembles the application, ``routes`` has one module per resource, ``stream`` and ``sse`` fan events out,
``errors`` says which status an exception becomes and ``problems`` how that is told.
"""
