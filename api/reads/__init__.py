"""Reads long records of jobs for as long as somebody waits for them."""

from api.reads.readers import Staying, while_staying, within

__all__ = ["Staying", "while_staying", "within"]
