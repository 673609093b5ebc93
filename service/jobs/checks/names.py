"""Whether a job's name and labels can be shown in one line."""

from __future__ import annotations

from collections.abc import Iterator

from service.jobs.plugins import CommonSpec
from service.jobs.records import Problem
from service.jobs.text import first_control


def check_names(spec: CommonSpec) -> Iterator[Problem]:
    """Yield the control characters of names and labels. Only at submission: jobs that exist keep theirs and run."""
    labels = ((f"labels.{key}", value) for key, value in spec.labels.items())
    for path, text in (("name", spec.name), *labels):
        if (found := first_control(text)) is not None:
            yield Problem(path, f"it holds the control character {found}", text, "text of one line")
