"""Propagates bounds over traced graphs, to certify a model and for certified training to minimise."""
