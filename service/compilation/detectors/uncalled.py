"""Reports a module to compile that was never called compiled: it agrees with eager because it ran as eager."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from service.compilation.monitor.uncompiled_calls import Calls
from service.compilation.run.observation import Observation
from service.compilation.verdicts import Finding


def detect(observation: Observation) -> Iterator[Finding]:
    if observation.error:
        return
    invoked = {call.module for call in observation.usage.invocations}
    seen = compiled_units(observation.units, invoked, observation.calls)
    for unit in observation.units:
        if unit not in seen:
            yield Finding("vacuous", f"{unit} was never called compiled: {_instead(observation, unit)}")


def compiled_units(units: Collection[str], invoked: Collection[str], calls: Calls) -> frozenset[str]:
    """Return those of ``units`` that ran compiled: ``invoked`` themselves, or called from within one that was."""
    found = frozenset(invoked)
    while True:
        inner = {each.unit for each in calls if each.unit in units and each.within in found}
        if inner <= found:
            return found & frozenset(units)
        found |= inner


def _instead(observation: Observation, unit: str) -> str:
    """Return how the module is called in the uncompiled run, whose steps are the same."""
    calls = {each: count for each, count in observation.calls.items() if each.unit == unit}
    ways = " and ".join(f"{each} {count} times" for each, count in calls.items() if each.is_bypass)
    if ways:
        return f"the program calls {ways}, which does not go through the compiled forward; call {unit}(...) itself"
    if calls:
        return f"only the uncompiled program calls it, {sum(calls.values())} times"
    return f"no call of it was seen in {observation.case.phase}"
