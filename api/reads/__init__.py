"""Reads long records of jobs for as long as somebody waits for them."""

from api.reads.history import History
from api.reads.readers import HistoryDep, while_staying, within

__all__ = ["History", "HistoryDep", "while_staying", "within"]
