"""Declares what operators watch: the metrics, and what to raise an alarm about. Pure: who reads or counts them is
elsewhere (``service/jobs/store/gauges.py``, ``service/jobs/store/gauges.py``).
"""
