"""Shows a job's life as it happens, in a terminal: state, progress bar, last metrics, bounds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from service.jobs.runtime import WORKING
from service.jobs.spec.common import TERMINAL
from service.jobs.text import visible

if TYPE_CHECKING:
    from trivet.terminal import Terminal

WATCHED = ("state", "phase", "progress", "metric", "bound", "search", "artifact", "error")
PLAIN_S = 5.0
_WIDE, _TITLE = 130, 30
"""Columns of a terminal that fits everything on one line, and of a job's title in a narrower one."""
_SHOWN_METRICS = ("loss", "eval_loss", "eval_accuracy", "eval_certified_accuracy", "accuracy", "lr", "step_ms")
_PASSED = "/passed"
"""The end of the name of a rung's metric, ``train/inductor/passed``: 1 or 0."""
_STYLES = {"succeeded": "green", "failed": "red", "cancelled": "yellow", "running": "cyan"}


@dataclass
class _JobView:
    """Follows one job by its events."""

    state: str = "queued"
    reason: str = ""
    metrics: dict[str, float | None] = field(default_factory=dict)
    verdicts: dict[int, str] = field(default_factory=dict)
    """Verdicts by instance; a verdict that is reported again, after a restart, counts once."""
    searching: str = ""
    climbed: str = ""
    """The last rung that a compile job tried, and whether it passed."""
    done: int = 0
    total: int | None = None
    unit: str = ""
    share: float | None = None
    phase: str = ""
    stage: str = ""
    """The phase before or after the work itself, such as loading, while the job is in it."""
    left_s: float | None = None

    def see(self, event: dict[str, Any]) -> None:
        handler = _HANDLERS.get(event["type"])
        if handler is not None:
            handler(self, event)

    @property
    def amount(self) -> str:
        """Return how much is done; empty before the first report."""
        return f"{self.done}{'' if self.total is None else f'/{self.total}'} {self.unit}" if self.unit else ""

    @property
    def doing(self) -> str:
        """Return the current work of the job and its expected duration, if known."""
        part = "" if self.share is None else f"{self.share:.0%}"
        left = "" if self.left_s is None else f"about {_seconds(self.left_s)} left"
        return ", ".join(filter(None, (self.stage, self.phase, part, left)))

    @property
    def line(self) -> str:
        """Return the newest numbers in a line."""
        shown = [name for name in _SHOWN_METRICS if name in self.metrics]
        parts = [f"{name} {_number(self.metrics[name])}" for name in shown[:4]]
        parts += [f"{verdict} {count}" for verdict, count in sorted(Counter(self.verdicts.values()).items())]
        parts += [each for each in (self.searching, self.climbed, self.doing) if each]
        return "  ".join(parts) or (self.reason if self.state == "queued" else "")


def _number(value: float | None) -> str:
    """Return a metric's value in few digits; events have null for one that is not finite."""
    return "nan" if value is None else f"{value:.4g}"


def _state(seen: _JobView, event: dict[str, Any]) -> None:
    seen.state = event["state"]
    seen.reason = event.get("reason") or ""
    seen.stage = ""


def _progress(seen: _JobView, event: dict[str, Any]) -> None:
    seen.done, seen.total, seen.unit = event["done"], event["total"], event["unit"]
    seen.share, seen.phase, seen.left_s = event.get("share"), event.get("phase") or "", event.get("left_s")


def _phase(seen: _JobView, event: dict[str, Any]) -> None:
    seen.stage = "" if event["name"] == WORKING else str(event["name"])


def _metric(seen: _JobView, event: dict[str, Any]) -> None:
    seen.metrics |= event["values"]
    for name, value in event["values"].items():
        if name.endswith(_PASSED) and value is not None:
            seen.climbed = f"{name.removesuffix(_PASSED)} {'passed' if value else 'did not pass'}"
            seen.done = event["step"]  # a compile job's steps are rungs: verdict and count belong together


def _bound(seen: _JobView, event: dict[str, Any]) -> None:
    seen.verdicts[event["instance"]] = event["verdict"]
    seen.done = max(seen.done, len(seen.verdicts))
    seen.searching = ""


def _search(seen: _JobView, event: dict[str, Any]) -> None:
    bound = "" if event["bound"] is None else f", bound {event['bound']:.3g}"
    seen.searching = f"instance {event['instance']}: {event['domains']} domains, {event['open']} open{bound}"


_HANDLERS: dict[str, Callable[[_JobView, dict[str, Any]], None]] = {
    "state": _state,
    "phase": _phase,
    "progress": _progress,
    "metric": _metric,
    "bound": _bound,
    "search": _search,
}


def show(console: Terminal, titles: Mapping[str, str], events: Iterable[dict[str, Any]]) -> None:
    """Draw the events of jobs (``titles`` by id) until they end.

    Without a terminal: a line per change of state, and a job's progress at most every ``PLAIN_S`` seconds.
    """
    if not console.is_terminal:
        show_plainly(console, titles, events)
        return
    seen = {job_id: _JobView() for job_id in titles}
    with _bar(console) as bar:
        tasks = {
            job_id: bar.add_task(visible(title), total=None, state="queued", line="")
            for job_id, title in titles.items()
        }
        for event in events:
            job_id = event["job"]
            seen[job_id].see(event)
            _announce(console, titles[job_id], event)
            _draw(bar, tasks[job_id], seen[job_id])


def show_plainly(
    console: Terminal,
    titles: Mapping[str, str],
    events: Iterable[dict[str, Any]],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Print a line per change of state, and one of progress where a job's last line is ``PLAIN_S`` seconds old."""
    seen = {job_id: _JobView() for job_id in titles}
    said = dict.fromkeys(titles, clock())
    for event in events:
        job_id, title = event["job"], titles[event["job"]]
        seen[job_id].see(event)
        if event["type"] == "state" or clock() - said[job_id] >= PLAIN_S:
            _print_plainly(console, title, seen[job_id], event)
            said[job_id] = clock()
        _announce(console, title, event)


def _bar(console: Terminal) -> Progress:
    if console.width >= _WIDE:
        title, numbers = Column(), [TextColumn("{task.fields[line]}", markup=False)]
    else:
        title, numbers = Column(width=_TITLE, no_wrap=True, overflow="ellipsis"), []
    return (Progress if numbers else _TwoLines)(
        TextColumn("{task.description}", style="bold", markup=False, table_column=title),
        _StateColumn(),
        BarColumn(bar_width=24 if numbers else 12),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        *numbers,
        console=console,
        refresh_per_second=8,
    )


class _TwoLines(Progress):
    """Shows the numbers of each job below its bar: a narrow terminal has no room beside it."""

    def get_renderables(self) -> Iterator[RenderableType]:
        for task in self.tasks:
            yield self.make_tasks_table([task])
            if task.fields["line"]:
                yield Text(f"  {task.fields['line']}", no_wrap=True, overflow="ellipsis")


def _seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class _StateColumn(ProgressColumn):
    """Shows a job's state in its colour."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["state"], style=_STYLES.get(task.fields["state"], ""))


def _draw(bar: Progress, task: TaskID, seen: _JobView) -> None:
    completed = seen.done if seen.share is None or seen.total is None else seen.share * seen.total
    bar.update(task, completed=completed, total=seen.total, state=visible(seen.state), line=visible(seen.line))
    if seen.state in TERMINAL:
        bar.stop_task(task)


def _print_plainly(console: Terminal, title: str, seen: _JobView, event: dict[str, Any]) -> None:
    if event["type"] == "state":
        reason = f" ({seen.reason})" if seen.reason else ""
        console.block(f"{visible(title)}: {seen.state}{reason}", indent=2)
    elif told := "  ".join(filter(None, (seen.amount, seen.line))):
        console.print(f"{title}: {told}")


def _announce(console: Terminal, title: str, event: dict[str, Any]) -> None:
    if event["type"] == "error":
        where = "" if event.get("rank") is None else f" on rank {event['rank']}"
        console.block(f"{visible(title)}: {event['error']}{where}: {event['message']}", style="red", indent=2)
    if event["type"] == "gap":
        console.print(f"{title}: some events were removed before they could be shown", style="yellow")
