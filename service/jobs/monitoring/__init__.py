"""Declares the metrics and alerts that operators watch.

Pure: ``service/jobs/store/gauges.py`` reads and counts them.
"""
