"""A plugin of pytest: tests are collected once, then run by several processes that are forked from the one that did.

Each takes a file of tests after the other, so a fixture of a module is made once; those of the session are made by each
process. All tests that need a browser are taken as one file, since a browser takes seconds to start. Long files come
first, so that all processes end together: a test takes as long as it took the last time, else what its markers say,
``slow(seconds)`` or ``distributed``. Tests that mostly wait, for leases to end or limits to pass, are marked ``waits``:
those of a file are taken by themselves, and one more process takes only such, which leaves the processors to the
others. What a process says about its tests is reported by the first one, as if it had run them. A test that ends its
process has failed, and another process takes up the rest of the file.
"""

from __future__ import annotations

import base64
import gc
import os
import pickle
import selectors
import signal
import sys
import traceback
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import launching
import pytest

from service.garbage import uncollected
from service.linux import die_with_parent

INDEX_BYTES = 4
SECONDS_OF_TESTS = "trivet/seconds-of-tests"
"""What pytest's cache keeps from run to run."""
SECONDS_OF_A_TEST, SECONDS_OF_A_GROUP, SECONDS_OF_A_SLOW_TEST = 0.1, 2.0, 3.0
"""What a test takes on average: one without a mark, one marked ``distributed``, and one marked ``slow`` and no more."""


@dataclass
class Runner:
    """A process that runs tests, as its parent sees it: ``at`` is the test that it told of last."""

    pid: int
    said: int
    queues: Sequence[int]
    at: int | None = None
    has_ended: bool = False
    rest: bytes = field(default=b"")

    def messages(self) -> Iterator[dict[str, Any]] | None:
        """What it has said since; None once it will say no more."""
        read = os.read(self.said, 1 << 16)
        *lines, self.rest = (self.rest + read).split(b"\n")
        return (pickle.loads(base64.b64decode(line)) for line in lines) if read else None


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _stated_seconds(item: pytest.Item) -> float:
    if marker := item.get_closest_marker("slow"):
        return float((*marker.args, SECONDS_OF_A_SLOW_TEST)[0])
    return SECONDS_OF_A_GROUP if item.get_closest_marker("distributed") else SECONDS_OF_A_TEST


def _files(items: Sequence[pytest.Item]) -> list[list[pytest.Item]]:
    """Tests that one process runs after each other: those of a file that compute, and those that wait; all that need a
    browser.
    """
    files: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in items:
        name = "browser" if item.get_closest_marker("browser") else _file(item.nodeid)
        files.setdefault((name, item.get_closest_marker("waits") is not None), []).append(item)
    return list(files.values())


def _queue(indexes: Sequence[int]) -> int:
    """A pipe from which processes take indexes, until none is left."""
    read, write = os.pipe()
    os.write(write, b"".join(index.to_bytes(INDEX_BYTES) for index in indexes))
    os.close(write)
    return read


class Quiet:
    """What is left of the terminal's reporter in a process whose reports are sent to another."""

    def __init__(self, reporter: Any) -> None:
        self._tw = reporter._tw


class Sender:
    def __init__(self, config: pytest.Config, pipe: int) -> None:
        self._config = config
        self._pipe = os.fdopen(pipe, "w")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.send(report=self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def send(self, **message: Any) -> None:
        print(base64.b64encode(pickle.dumps(message)).decode(), file=self._pipe, flush=True)


class ForkedTests:
    """Runs the tests of a session in so many processes, with a folder for what is to be gone afterwards."""

    def __init__(self, processes: int, scratch: Path) -> None:
        self._processes = processes
        self._scratch = scratch
        self._running: list[Runner] = []
        self._seconds: dict[str, float] = {}
        self._selector = selectors.DefaultSelector()

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, Any, Any]:
        with uncollected():
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest's own loop says what there is to say
        self._session = session
        self._index = {item: index for index, item in enumerate(session.items)}
        self._files = self._longest_first(_files(session.items))
        queues = self._queues()
        has_groups = any(item.get_closest_marker("distributed") for item in session.items)
        log = self._scratch / "rank-servers.txt"
        self._servers = launching.StartingServers.start(len(queues), log) if has_groups else None
        gc.collect()
        gc.freeze()
        try:
            for number, each in enumerate(queues):
                self._fork(number, each)
            self._listen()
            self._remember()
        finally:
            self._end()
        return True

    def _queues(self) -> list[tuple[int, ...]]:
        """From where each process takes its files: first those that compute, or only those that wait."""
        waits = [tests[0].get_closest_marker("waits") is not None for tests in self._files]
        computing, waiting = (_queue([i for i, each in enumerate(waits) if each == kind]) for kind in (False, True))
        return [(computing, waiting)] * min(self._processes, len(waits)) + [(waiting,)] * any(waits)

    def _longest_first(self, files: list[list[pytest.Item]]) -> list[list[pytest.Item]]:
        """Files in the order of the seconds that their tests are likely to take."""
        seconds = self._remembered()
        return sorted(files, key=lambda tests: -sum(seconds.get(test.nodeid, _stated_seconds(test)) for test in tests))

    def _remembered(self) -> dict[str, float]:
        """How long each test took when it was run last, where that is known."""
        cache = getattr(self._session.config, "cache", None)
        return dict(cache.get(SECONDS_OF_TESTS, {})) if cache else {}

    def _remember(self) -> None:
        if cache := getattr(self._session.config, "cache", None):
            cache.set(SECONDS_OF_TESTS, {**self._remembered(), **self._seconds})

    def _listen(self) -> None:
        """Report what the processes say until none of them is left."""
        while self._running:
            for key, _ in self._selector.select():
                runner: Runner = key.data
                messages = runner.messages()
                for message in messages or ():
                    self._take(runner, message)
                if messages is None or runner.has_ended:
                    self._bury(runner)
            if self._session.shouldfail:
                raise self._session.Failed(self._session.shouldfail)

    def _take(self, runner: Runner, message: dict[str, Any]) -> None:
        config = self._session.config
        runner.at = message.get("at", runner.at)
        runner.has_ended = "ended" in message
        if "report" in message:
            report = config.hook.pytest_report_from_serializable(config=config, data=message["report"])
            test = report.nodeid
            self._seconds[test] = round(self._seconds.get(test, 0.0) + report.duration, 2)
            config.hook.pytest_runtest_logreport(report=report)

    def _bury(self, runner: Runner) -> None:
        self._selector.unregister(runner.said)
        os.close(runner.said)
        self._running.remove(runner)
        _, status = os.waitpid(runner.pid, 0)
        if runner.has_ended:
            return
        assert runner.at is not None, f"a process that was to run tests ended at once, with status {status}"
        item = self._session.items[runner.at]
        code = os.waitstatus_to_exitcode(status)
        text = f"the process that ran this test ended with {f'exit status {code}' if code >= 0 else f'signal {-code}'}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        self._session.config.hook.pytest_runtest_logreport(report=report)
        (file,) = (each for each in self._files if item in each)
        self._fork(None, runner.queues, file[file.index(item) + 1 :])

    def _fork(self, number: int | None, queues: Sequence[int], first: Sequence[pytest.Item] = ()) -> None:
        """Start a process that runs these tests and then whole files, until the queues have none left."""
        said, say = os.pipe()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                die_with_parent()
                os.close(said)
                self._run(Sender(self._session.config, say), number, queues, first)
                status = 0
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(status)
        os.close(say)
        self._running.append(Runner(pid, said, queues))
        self._selector.register(said, selectors.EVENT_READ, self._running[-1])

    def _run(self, sender: Sender, number: int | None, queues: Sequence[int], first: Sequence[pytest.Item]) -> None:
        session, plugins = self._session, self._session.config.pluginmanager
        plugins.register(Quiet(plugins.unregister(name="terminalreporter")), "terminalreporter")
        plugins.register(sender)
        capture = plugins.getplugin("capturemanager")  # of whose files parent and child would share the position
        capture.stop_global_capturing()
        capture.start_global_capturing()
        if number is not None and self._servers is not None:
            launching.inherit(self._servers, number)
        try:
            self._run_file(sender, first)
            for queue in queues:
                while index := os.read(queue, INDEX_BYTES):
                    self._run_file(sender, self._files[int.from_bytes(index)])
        finally:
            session._setupstate.teardown_exact(None)
            capture.stop_global_capturing()
        sender.send(ended=True)

    def _run_file(self, sender: Sender, tests: Sequence[pytest.Item]) -> None:
        """Run tests; what only their file needs is torn down with the last, what the session needs is kept."""
        for item, following in zip(tests, [*tests[1:], self._session], strict=False):  # no test, no next
            sender.send(at=self._index[item])
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def _end(self) -> None:
        """End the processes that still run, which take down what they have set up."""
        for runner in self._running:
            os.kill(runner.pid, signal.SIGINT)
        for runner in self._running:
            os.waitpid(runner.pid, 0)
