"""Defines the settings of the service, and the URL of its broker."""

from service.jobs.settings.broker_url import Invitation, NoInvitation, tls_options
from service.jobs.settings.settings import LOOPBACK, MAX_LOG_BYTES, Settings, describe, sources

__all__ = ["LOOPBACK", "MAX_LOG_BYTES", "Invitation", "NoInvitation", "Settings", "describe", "sources", "tls_options"]
