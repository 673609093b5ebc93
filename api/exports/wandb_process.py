"""Runs the client of Weights & Biases for :mod:`api.exports.wandb`, in a process that knows nothing of Trivet.

It reads the server's URL and key from the first line of its input, a call from each further one, and answers each in a
line of its output: JSON all of them. Runs stay open from call to call. It ends with its input, when nobody has asked
for a while, and when a run was left open: its export is then another process's. No run is finished by that.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import wandb

STEP, SENT = "trivet/step", "trivet/sent"
_AT_ONCE = 8
_LOOK_S, _IDLE_S, _LEFT_S = 5.0, 60.0, 180.0
_BUSY_S = 10.0
_INIT_S, _FINISH_S = 20.0, 60.0
_SHOWN = 300


@dataclass
class OpenRun:
    """A run, with what the server has or will have of it: how many rows, and the last step of each metric."""

    run: wandb.Run
    rows: int
    last: dict[str, float]

    def log(self, rows: list[tuple[float, float, dict[str, float | None]]]) -> None:
        """Log rows of step, time and values, as far as they are later than what there is."""
        before = self.rows
        for step, when, values in rows:
            fresh = {name: _number(each) for name, each in values.items() if step > self.last.get(name, -math.inf)}
            if fresh:
                self.run.log({**fresh, STEP: step, "_timestamp": when})
                self.last.update(dict.fromkeys(fresh, step))
                self.rows += 1
        if self.rows > before:
            self.run.summary[SENT] = json.dumps({"rows": self.rows, "last": self.last})


@dataclass
class Runs:
    """The runs on one server, or offline, each with when it was last asked for."""

    server: Mapping[str, str]
    home: str
    _open: dict[str, OpenRun] = field(default_factory=dict)
    _used: dict[str, float] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)
    _asked: float = field(default_factory=time.monotonic)

    def begin(self, run_id: str, folder: str, **about: Any) -> dict[str, Any]:
        """Open a run, in which an online one goes on; one offline is written anew."""
        with self._alone(run_id):
            if run_id in self._open and not folder:
                return {}
            if found := self._open.pop(run_id, None):
                found.run.finish()
            self._open[run_id] = self._opened(run_id, folder, about)
            return {}

    def send(self, run_id: str, rows: list[tuple[float, float, dict[str, float | None]]]) -> dict[str, Any]:
        with self._alone(run_id):
            self._open[run_id].log(rows)
            return {}

    def end(self, run_id: str, exit_code: int, config: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
        """End a run, once the server has taken all or has said why not."""
        with self._alone(run_id):
            found = self._open.pop(run_id)
            run: Any = found.run  # whose mappings have no types
            run.config.update(config, allow_val_change=True)
            run.summary.update(summary)
            where = {"url": run.url, "entity": run.entity, "project": run.project}
            run.finish(exit_code=exit_code)
            return {**where, "rows": found.rows}

    def has_none_open(self) -> bool:
        return not self._open

    def has_nothing_to_do(self, now: float) -> bool:
        """Return whether the process may end: nobody asks, or a run was left open and belongs to another process."""
        used = dict(self._used)
        if math.inf in used.values():
            return False
        return now - self._asked > _IDLE_S if not used else now - min(used.values()) > _LEFT_S

    @contextmanager
    def _alone(self, run_id: str) -> Iterator[None]:
        lock = self._locks.setdefault(run_id, threading.Lock())
        if not lock.acquire(timeout=_BUSY_S):
            raise TimeoutError("the run is still busy with an earlier call")
        try:
            self._used[run_id] = math.inf
            yield
        finally:
            self._asked = time.monotonic()
            if run_id in self._open:
                self._used[run_id] = self._asked
            else:
                self._used.pop(run_id, None)
            lock.release()

    def _opened(self, run_id: str, folder: str, about: dict[str, Any]) -> OpenRun:
        import wandb  # noqa: PLC0415 - this module is read without it, too

        if folder:
            shutil.rmtree(folder, ignore_errors=True)
            Path(folder).mkdir(parents=True)
            run = wandb.init(**about, id=run_id, dir=folder, mode="offline", settings=_settings({}))
            return OpenRun(run, 0, {})
        settings = _settings({"base_url": self.server["url"], "api_key": self.server["key"]})
        run = wandb.init(**about, id=run_id, dir=self.home, mode="online", resume="allow", settings=settings)
        run.define_metric("*", step_metric=STEP)
        summary: Any = run.summary  # untyped there
        sent = json.loads(summary.get(SENT) or "{}")
        is_whole = run.starting_step >= sent.get("rows", 0)
        return OpenRun(run, run.starting_step, sent.get("last", {}) if is_whole else {})


def _settings(server: dict[str, str]) -> wandb.Settings:
    """Return settings by which the client sends what it is given, and nothing of this machine."""
    import wandb  # noqa: PLC0415

    return wandb.Settings(
        **server,
        reinit="create_new",
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        ignore_globs=("*",),
        init_timeout=_INIT_S,
        finish_timeout=_FINISH_S,
        finish_timeout_raises=True,
        stop_fn=_stay,
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
        x_skip_transaction_log=bool(server),
        x_file_stream_transmit_interval=1.0,
    )


def _stay() -> None:
    """Ignore the button that stops a run: a job is stopped in Trivet."""


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _answer(runs: Runs, asked: dict[str, Any], answers: TextIO, writing: threading.Lock) -> None:
    import wandb  # noqa: PLC0415

    number, is_broken = asked.pop("call"), False
    try:
        told = {"is": getattr(runs, asked.pop("do"))(**asked)}
    except KeyError:
        told = {"gone": "the run is no longer open"}
    except (wandb.errors.Error, TimeoutError, OSError, ValueError) as error:
        told, is_broken = {"error": _shown(error)}, runs.has_none_open()  # a run that did not begin keeps its id in use
    except Exception as error:
        told, is_broken = {"error": _shown(error)}, True
    with writing:
        print(json.dumps({"call": number, **told}), file=answers, flush=True)
    if is_broken:
        os._exit(1)


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_SHOWN]


def _watch(runs: Runs) -> None:
    while not runs.has_nothing_to_do(time.monotonic()):
        time.sleep(_LOOK_S)
    os._exit(0)


def main() -> None:
    """Answer until the input ends."""
    server = json.loads(sys.stdin.readline())
    answers, writing = os.fdopen(os.dup(1), "w"), threading.Lock()
    os.dup2(2, 1)  # what the client prints is no answer
    import wandb  # noqa: F401, PLC0415 - once, and not by several threads; without it, this process ends

    runs = Runs(server, os.environ["HOME"])
    threading.Thread(target=_watch, args=(runs,), daemon=True).start()
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for line in sys.stdin:
            threads.submit(_answer, runs, json.loads(line), answers, writing)
        os._exit(0)  # runs that are open go on elsewhere, so none is finished


if __name__ == "__main__":
    main()
