"""Remembers the numbers that alerts read, for all API processes together, so that any of them can tell for how long
something has been the case, also after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from service.jobs.monitoring.alerts import REMEMBERED_S, WATCHED
from service.jobs.monitoring.conditions import Moment
from service.jobs.monitoring.numbers import Numbers, Series
from service.jobs.store.client import BrokerClient
from service.jobs.store.keyspace import SAMPLES, SAMPLING

SAMPLE_S = 30.0
_KEPT = round(REMEMBERED_S / SAMPLE_S)


@dataclass(frozen=True)
class SampleStore:
    """Takes one sample in :data:`SAMPLE_S`, whichever process is first; old ones go."""

    client: BrokerClient

    def is_due(self) -> bool:
        """Return whether the caller is to take the next sample: true of one process in each period."""
        return bool(self.client.call("SET", SAMPLING(), 1, "NX", "PX", round(SAMPLE_S * 1000)))

    def record(self, moment: Moment) -> None:
        """Remember what alerts read of these numbers, instead of the oldest."""
        watched = [(*series, value) for series, value in moment.numbers.items() if series.name in WATCHED]
        self.client.call("RPUSH", SAMPLES(), orjson.dumps({"at": moment.at, "numbers": watched}))
        self.client.call("LTRIM", SAMPLES(), -_KEPT, -1)

    def history(self) -> list[Moment]:
        """Return the remembered samples by time. Those later than the last are from before a clock was set back."""
        moments = [_moment(orjson.loads(text)) for text in self.client.call("LRANGE", SAMPLES(), 0, -1)]
        last = moments[-1].at if moments else 0.0
        return sorted((each for each in moments if each.at <= last), key=lambda each: each.at)


def _moment(entry: dict[str, object]) -> Moment:
    numbers: Numbers = {}
    listed = entry["numbers"]
    assert isinstance(listed, list)
    for name, labels, value in listed:
        numbers[Series(name, tuple((label, text) for label, text in labels))] = value
    at = entry["at"]
    assert isinstance(at, float | int)
    return Moment(float(at), numbers)
