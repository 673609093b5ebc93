"""The core: jobs and their store (``jobs``), the three kinds (``training``, ``verification``, ``compilation``), and
what they share (``bounds``, ``models``, ``parallel``, ``schedules``, ``formats``).
"""
