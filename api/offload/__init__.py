"""Keeps work off the event loop that answers: checks in processes with limits, expensive answers apart and by turns."""

from api.offload.apart import Apart, NotReady
from api.offload.check_processes import CheckUnavailable
from api.offload.checker import Checker, CheckerSettings
from api.offload.leaving import ClientLeftError, disconnected, while_connected
from api.offload.turns import FairTurns

__all__ = [
    "Apart",
    "CheckUnavailable",
    "Checker",
    "CheckerSettings",
    "ClientLeftError",
    "FairTurns",
    "NotReady",
    "disconnected",
    "while_connected",
]
