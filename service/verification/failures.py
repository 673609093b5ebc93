"""Keeps a fault of the service to the instance in which it occurred: the others are decided, and the job then fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from service.bounds.memory import is_out_of_memory
from service.causes import causes
from service.jobs.runtime import Reporter
from service.verification.search_runner import StoppedError
from service.verification.task import Task

T = TypeVar("T")
MOST_NAMED = 10


class RowsFailedError(RuntimeError):
    """Instances ended in an error of the service, not in a verdict; the message names them and the first error."""


@dataclass(eq=False)
class RowFailures:
    """The errors of this rank's instances. They are no rows: a later attempt tries these instances again."""

    report: Reporter
    errors: dict[int, Exception] = field(default_factory=dict)

    def unless_failed(self, task: Task, instances: Sequence[int], run: Callable[[], T]) -> T | None:
        """Return the result for some instances of a task, or ``None`` after an error, which is theirs.

        An error is raised if another rank would wait for this one, and so is a lack of memory.
        """
        try:
            return run()
        except StoppedError:
            raise
        except Exception as error:
            if not task.is_alone or is_out_of_memory(error):
                raise
            self.add(instances, error)
        return None

    def add(self, instances: Sequence[int], error: Exception) -> None:
        for cause in causes(error):
            traceback.clear_frames(cause.__traceback__)  # they hold the tensors of the failed step
        for instance in instances:
            self.errors[instance] = error
            self.report.log(f"instance {instance}: failed, {_describe_error(error)}")

    def raise_first(self, count: int) -> None:
        """Raise :class:`RowsFailedError` if any of the job's ``count`` instances failed on this rank."""
        if not self.errors:
            return
        named = ", ".join(map(str, sorted(self.errors)[:MOST_NAMED])) + ", …" * (len(self.errors) > MOST_NAMED)
        error = self.errors[min(self.errors)]
        raise RowsFailedError(
            f"{len(self.errors)} of {count} instances ended in an error of the service, not in a verdict: {named}; "
            f"the rows of the others are kept. The first error: {_describe_error(error)}"
        ) from error


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
