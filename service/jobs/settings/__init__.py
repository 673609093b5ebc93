"""Defines the settings of the service, a file for each group of them, and the URL of its broker."""

from service.jobs.settings.broker_url import Invitation, NoInvitation, tls_options
from service.jobs.settings.retention import MAX_LOG_BYTES
from service.jobs.settings.settings import Settings, describe, sources, unknown_variables
from service.jobs.settings.sign_in import LOOPBACK
from service.jobs.settings.words import Network

__all__ = [
    "LOOPBACK",
    "MAX_LOG_BYTES",
    "Invitation",
    "Network",
    "NoInvitation",
    "Settings",
    "describe",
    "sources",
    "tls_options",
    "unknown_variables",
]
