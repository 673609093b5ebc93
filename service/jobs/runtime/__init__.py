"""Gives a kind of job on a rank what it has of the service: its context, its reports, its clock, its meeting place.

``plain_tables`` is imported by its own name: only jobs that write tables need pyarrow.
"""

from service.jobs.runtime.rendezvous_folder import VARIABLE, RendezvousError
from service.jobs.runtime.reporting import Channel, RankReporter, connect
from service.jobs.runtime.run_context import (
    ENDING,
    GATE_ARTIFACTS,
    HOST_CACHE,
    LARGEST_RESULT,
    RESULT,
    SPEC,
    WORKING,
    Completion,
    NullReporter,
    RefusedError,
    Reporter,
    RunContext,
    Runner,
)
from service.jobs.runtime.script_run import ScriptRun
from service.jobs.runtime.stopwatch import Stopwatch

__all__ = [
    "ENDING",
    "GATE_ARTIFACTS",
    "HOST_CACHE",
    "LARGEST_RESULT",
    "RESULT",
    "SPEC",
    "VARIABLE",
    "WORKING",
    "Channel",
    "Completion",
    "NullReporter",
    "RankReporter",
    "RefusedError",
    "RendezvousError",
    "Reporter",
    "RunContext",
    "Runner",
    "ScriptRun",
    "Stopwatch",
    "connect",
]
