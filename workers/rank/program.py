"""Runs the program of every rank: ``python -m workers.rank`` under torchrun.

Ties itself to its launcher, gives its output and its events to the supervisor, then hands over to the job's kind.
Rank 0 leaves what the kind returns in the work folder of its attempt.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import math
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NoReturn, cast

import orjson

from service.garbage import uncollected
from service.jobs.files import DISK_FULL, DataLayout, atomic_write, full_disk
from service.jobs.runtime import (
    ENDING,
    GATE_ARTIFACTS,
    HOST_CACHE,
    LARGEST_RESULT,
    RESULT,
    SPEC,
    Channel,
    RankReporter,
    RefusedError,
    RunContext,
    Runner,
    Stopwatch,
    connect,
)
from service.linux import die_with_parent, uptime
from workers.event_protocol import LineSplitter
from workers.rank.stacks import write_on_request


def _installed_runner(kind: str) -> Runner:
    """Return the function of a kind, imported only now: it brings torch."""
    from service.jobs.kinds.registry import KINDS  # noqa: PLC0415 - first tell the supervisor that this rank is there

    return cast(Runner, KINDS.function(kind))


def main(find_runner: Callable[[str], Runner] = _installed_runner) -> int:
    """Run this rank of the attempt that the environment names; return the exit code."""
    watch = Stopwatch()
    die_with_parent()
    faulthandler.enable()
    address, rank = os.environ["TRIVET_EVENTS"], int(os.environ["RANK"])
    secret = os.environ["TRIVET_EVENTS_SECRET"]
    _redirect(sys.stdout.fileno(), address, rank, "stdout", secret)
    _redirect(sys.stderr.fileno(), address, rank, "stderr", secret)
    layout = DataLayout(Path(os.environ["TRIVET_DATA"]))
    connection = connect(address, rank, "control", secret)
    paths, attempt = layout.job(os.environ["TRIVET_JOB"]), int(os.environ["TRIVET_ATTEMPT"])
    report = RankReporter(connection, rank, paths, attempt)
    report.phase("importing")
    write_on_request(paths.attempt(attempt), rank)
    control = Control(connection, lambda: _be_terminated(report))
    try:
        _run(_context(layout, report, control), find_runner, watch)
        report.done()
    except BaseException as error:  # the user wants to know the cause, whatever it is
        _give_up(report, error, paths.root)
    return 0


def _run(context: RunContext, find_runner: Callable[[str], Runner], watch: Stopwatch) -> None:
    from service.jobs.kinds.registry import spec_adapter  # noqa: PLC0415 - first tell the supervisor that this rank is there

    folder = context.paths.attempt(context.attempt)
    with uncollected():
        spec = spec_adapter.validate_json((folder / SPEC).read_bytes())
        run = find_runner(spec.kind)
    gc.freeze()  # what imports made stays: one search through all of it takes a tenth of a second
    context.report.span("import", watch.began, watch.now)
    context.report.phase("loading")
    result = run(spec, context)
    context.report.phase(ENDING)
    if context.rank == 0:
        left = orjson.dumps(result, option=orjson.OPT_SERIALIZE_NUMPY)
        if len(left) > LARGEST_RESULT:
            raise ValueError(
                f"the result has {len(left)} bytes, and a job's record holds {LARGEST_RESULT}: use an artifact"
            )
        atomic_write(context.paths.work(context.attempt) / RESULT, left)


def _context(layout: DataLayout, report: RankReporter, control: Control) -> RunContext:
    return RunContext(
        job_id=os.environ["TRIVET_JOB"],
        attempt=int(os.environ["TRIVET_ATTEMPT"]),
        rank=int(os.environ["RANK"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        device_type=cast(Literal["cuda", "cpu"], os.environ["TRIVET_DEVICE"]),
        data=layout,
        report=report,
        should_stop=control.stop.is_set,
        ends_early=lambda: control.ends_early,
        gate_artifacts=_gate_artifacts(layout),
        host_cache=Path(kept) if (kept := os.environ.get(HOST_CACHE)) else None,
    )


def _gate_artifacts(layout: DataLayout) -> Mapping[str, str]:
    folder = layout.job(os.environ["TRIVET_JOB"]).attempt(int(os.environ["TRIVET_ATTEMPT"]))
    return cast(Mapping[str, str], orjson.loads((folder / GATE_ARTIFACTS).read_bytes()))


def _redirect(descriptor: int, address: str, rank: int, channel: Channel, secret: str) -> None:
    """Send everything written to ``descriptor``, also by native code and child processes, to the supervisor."""
    with connect(address, rank, channel, secret) as connection:
        os.dup2(connection.fileno(), descriptor)


def _be_terminated(report: RankReporter) -> NoReturn:
    """Tell the supervisor of a SIGTERM that it did not send, and end by that signal."""
    report.terminated()
    os._exit(128 + signal.SIGTERM)


def _give_up(report: RankReporter, error: BaseException, folder: Path) -> None:
    """Report the error, and exit without finalising the interpreter: that may wait for peers that wait for this
    rank.
    """
    refused, full = isinstance(error, RefusedError), full_disk(error, folder)
    text = "".join(traceback.format_exception(error))
    report.flush()
    final = isinstance(error, RefusedError) and error.final and not full
    report.error(DISK_FULL if full else type(error).__name__, full or str(error), "" if refused else text, final=final)
    with contextlib.suppress(OSError):
        print(f"refused: {error}" if refused else text, file=sys.stderr, flush=True)
    os._exit(1)


_LONGEST = 4096


class Control:
    """Listens in its own thread to the supervisor, on the rank's control connection, and to SIGTERM. ``stop`` is set
    when the supervisor asks for it, and ``ends_early`` says why it asks to end the job as a success.

    When the last announced lease ends, the thread kills the rank: by then another attempt may write to the job's
    folder. ``terminated`` is called, in that thread, when SIGTERM arrives: a supervisor never sends it, so the rank
    must say so and end. Forks of this process have none of this.
    """

    def __init__(self, connection: socket.socket, terminated: Callable[[], None]) -> None:
        """Begin to listen. Only the main thread may call this, since only it may set signal handlers."""
        self.stop = threading.Event()
        self.ends_early: str | None = None
        self._connection = connection.dup()
        self._lines = LineSplitter(_LONGEST)
        self._until = math.inf
        self._terminated = terminated
        self._signals, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._connection, selectors.EVENT_READ, self._hear)
        self._selector.register(self._signals, selectors.EVENT_READ, self._be_signalled)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        os.register_at_fork(after_in_child=_let_go)
        threading.Thread(target=self._listen, name="trivet-control", daemon=True).start()

    def _listen(self) -> None:
        while True:
            wait = None if math.isinf(self._until) else max(0.0, self._until - uptime())
            # The lease may have been extended while this process could not run, and Python does not look again
            # after an interrupted wait: bytes that have come are read first.
            ready = self._selector.select(wait) or self._selector.select(0)
            for key, _ in ready:
                if not key.data():
                    self._selector.unregister(key.fileobj)
            if not ready and uptime() >= self._until:
                os.kill(os.getpid(), signal.SIGKILL)

    def _hear(self) -> bool:
        """Handle the supervisor's messages; return False once it has hung up. Then its keeper ends this rank,
        or the lease does.
        """
        with contextlib.suppress(ConnectionError):
            if text := self._connection.recv(_LONGEST):
                for line in self._lines.feed(text):
                    self._obey(line.text)
                return True
        return False

    def _obey(self, line: bytes) -> None:
        match orjson.loads(line):
            case {"type": "stop"}:
                self.stop.set()
            case {"type": "end", "reason": str(reason)}:
                self.ends_early = reason
            case {"type": "lease", "until": float(until)}:
                self._until = until

    def _be_signalled(self) -> bool:
        if signal.SIGTERM in os.read(self._signals, 512):
            self._terminated()
        return True


def _let_go() -> None:
    """Stop handling signals in a forked helper: it shares the pipe, so its SIGTERM would look like the rank's."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
