"""Stands around the framework: what answers before it, and what becomes of requests that it refuses."""

from api.front.expensive import ExpensiveAnswers
from api.front.middleware import Hardening, HostNames, RequestIds, known_names
from api.front.plain_reads import PlainReads
from api.front.plain_submissions import PlainSubmissions

__all__ = ["ExpensiveAnswers", "Hardening", "HostNames", "PlainReads", "PlainSubmissions", "RequestIds", "known_names"]
