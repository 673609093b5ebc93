"""Keeps what projects have used, and their weights, by which fair share orders their jobs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from service.jobs.queue.fair_share import Use
from service.jobs.records import Problem, ProjectShare, Rejected
from service.jobs.store import stubs
from service.jobs.store.client import BrokerClient
from service.jobs.store.keyspace import WEIGHTS
from service.jobs.store_limits import StoreLimits

HEAVIEST = 1e6


@dataclass(frozen=True)
class Shares:
    """Fair share of the projects. Use is charged by the scripts that give out and take back devices."""

    client: BrokerClient
    limits: StoreLimits

    def uses(self) -> dict[str, Use]:
        """Return the use of each project that has any, or whose weight is not 1."""
        rows = stubs.read_uses(self.client, self.limits.script_argument)
        return {
            project: Use(float(used_ms) / 1000, int(held), float(weight)) for project, used_ms, held, weight in rows
        }

    def list(self) -> list[ProjectShare]:
        """List projects by share, the one whose jobs are next first."""
        uses = sorted(self.uses().items(), key=lambda item: (item[1].share, item[0]))
        return [_record(project, use) for project, use in uses]

    def weigh(self, project: str, weight: float) -> ProjectShare:
        """Give a project a weight: one of weight 2 may use twice as much as one of weight 1.

        Raises :class:`Rejected` for a weight that is out of range.
        """
        if not (math.isfinite(weight) and 1 / HEAVIEST <= weight <= HEAVIEST):
            problem = Problem("weight", "out of range", weight, f"{1 / HEAVIEST:g} to {HEAVIEST:g}")
            raise Rejected([problem])
        if weight == 1:
            self.client.call("HDEL", WEIGHTS(), project)
        else:
            self.client.call("HSET", WEIGHTS(), project, repr(float(weight)))
        return _record(project, self.uses().get(project, Use(weight=weight)))


def _record(project: str, use: Use) -> ProjectShare:
    return ProjectShare(project=project, weight=use.weight, used_s=use.used_s, devices=use.held, share=use.share)
