"""Brings several ranks to one verdict, even if some of them fail."""
