"""Reads long records of jobs for as long as somebody waits for them."""

from api.reads.history import EventHistory
from api.reads.readers import HistoryDep, while_staying, within

__all__ = ["EventHistory", "HistoryDep", "while_staying", "within"]
