"""Reports the trees of splits that searches record, as many as a job has room for."""

from __future__ import annotations

from dataclasses import dataclass

from service.jobs.runtime import Reporter
from service.verification.bab.driver import DecisionProgress
from service.verification.bab.split_tree import SplitRecord

MOST_NODES = 400
"""Domains of one search that its tree shows; the others are counted."""
MOST_REPORTED = 100_000
"""Domains of all trees that a rank reports of one model, at some 50 bytes each."""


@dataclass(eq=False)
class TreeReports:
    """The trees of this rank's searches, which ``ranks`` search together; ``left`` is how many domains may still be
    reported.
    """

    report: Reporter
    ranks: int
    left: int = MOST_REPORTED

    def room(self) -> SplitRecord:
        """Return where the searches for a verdict record their splits: nowhere once all room is taken."""
        return SplitRecord(MOST_NODES if self.left > 0 else 0)

    def tell(self, instance: int, progress: DecisionProgress, record: SplitRecord) -> None:
        """Report what was split so far, if anything was and there is room."""
        if self.left <= 0 or not (searches := record.as_list()):
            return
        self.left -= sum(len(search["state"]) for search in searches)
        if self.left <= 0:
            self.report.log("the trees of later searches are not recorded: those so far take all of their room")
        found = {"instance": instance, "domains": progress.domains, "seconds": progress.seconds, "ranks": self.ranks}
        self.report.tree({**found, "searches": searches})
