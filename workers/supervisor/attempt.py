"""Runs one claimed part of an attempt, from its launch to its report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import orjson

from service.jobs.events import RECORDED_ONLY, ArtifactEvent, Event, host_file
from service.jobs.files import DataLayout, Folder
from service.jobs.host import SupervisorRegistry
from service.jobs.records import Artifact, Claim, EndEarly, Superseded
from service.jobs.runtime import GATE_ARTIFACTS
from service.jobs.store import Store, StoreUnavailable
from service.jobs.tracing import tracing_for
from workers import event_protocol
from workers.inventory import oom_kills, threads_of_a_rank
from workers.supervisor import attempt_folder, command
from workers.supervisor.attempt_folder import LeftResult, compile_cache, gate_artifacts, make_files_of_ranks
from workers.supervisor.attempt_trace import AttemptTrace, submitting_span, traced_attempt
from workers.supervisor.collector import Collector, find_unrelayed
from workers.supervisor.first_cause import DiskThread, Ending, FirstCause
from workers.supervisor.group import Group
from workers.supervisor.lease import Lease, News, claim_part, let_a_killer_finish, let_others_speak_first, retry_until
from workers.supervisor.logs import GrowingFile, RotatedLog
from workers.supervisor.mirror import Mirror
from workers.supervisor.outcome import Evidence, judge, may_be_aftermath, may_be_the_end_of_all, traceback_name
from workers.supervisor.publisher import Publisher, clear_unpublished
from workers.supervisor.rank_socket import Admission, RankSocket
from workers.supervisor.settings import SupervisorOrder, SupervisorSettings
from workers.supervisor.stall_watch import StallWatch
from workers.supervisor.tidying import compact, share_contents, tidy
from workers.supervisor.uploader import Thresholds, Uploader

logger = logging.getLogger(__name__)

_NOT_THE_RANKS = ("lease_expired", "lost", "interrupted", "terminated", "fault")
"""Causes from outside, which do not undo finished work."""


async def supervise(order: SupervisorOrder, group: Group, program: Sequence[str], settings: SupervisorSettings) -> None:
    """Claim the ordered part, run it, and report how it ended. Return quietly if the part cannot be claimed."""
    store = Store.connect(order.broker_url, DataLayout(Path(order.data)), order.limits)
    granted = await claim_part(store, order, settings)
    if granted is not None:
        claim, asked_at = granted
        tracing = tracing_for("supervisor", os.environ)
        parent = await submitting_span(tracing, store, order.job_id, settings)
        with traced_attempt(tracing, parent, claim, DataLayout(Path(order.data)).job(order.job_id)) as trace:
            await _PartRun(store, group, _ClaimedPart(claim, asked_at, order, tuple(program), settings), trace).run()


@dataclass(frozen=True)
class _ClaimedPart:
    """A claimed part, and how to run it."""

    claim: Claim
    asked_at: float
    """The time just before the claim was sent (:func:`service.linux.uptime`), from which its lease counts."""
    order: SupervisorOrder
    program: tuple[str, ...]
    """The program that torchrun starts as ranks."""
    settings: SupervisorSettings


class _PartRun:
    """Runs one part from its launch to its report. The :class:`FirstCause` ends it."""

    def __init__(self, store: Store, group: Group, part: _ClaimedPart, trace: AttemptTrace) -> None:
        claim, settings = part.claim, part.settings
        self._store, self._group, self._trace = store, group, trace
        self._claim, self._order, self._program, self._settings = claim, part.order, part.program, settings
        self._layout = DataLayout(Path(part.order.data))
        self._paths = self._layout.job(claim.ref.job_id)
        self._folder = self._paths.attempt(claim.ref.attempt)
        self._cause = FirstCause(lambda: self._lease.is_over)
        self._disk = DiskThread(self._folder, self._cause)
        self._loop = asyncio.get_running_loop()
        self._ended_here = False
        self._oom_kills = oom_kills()
        self._record = GrowingFile(host_file(self._folder, claim.ref.host, leads=claim.leads))
        attempts, disk = store.attempts, self._disk.run
        thresholds = Thresholds(claim.spec.notify)
        self._uploader = uploader = Uploader(
            attempts, claim.ref, self._record, self._cause.lose, thresholds=thresholds, disk=disk, settings=settings
        )
        self._mirror = Mirror(claim, self._layout, store.artifacts, store.files, settings, lambda: self._cause.is_lost)
        self._publisher = Publisher(
            attempts, claim.ref, self._paths, uploader, settings=settings, store=self._mirror.publish
        )
        self._socket = socket = RankSocket(
            group.socket,
            self._folder,
            say=uploader.put,
            offer=uploader.offer,
            alarm=lambda: self._cause.end("rank_failed"),
            admission=Admission(secrets.token_hex(16), claim.ranks, os.getpid()),
            settings=settings,
            most_log_bytes=self._order.policy.most_log_bytes,
        )
        self._collector = Collector(
            self._folder, socket, uploader, take=self._take, recover=self._recover, disk=disk, settings=settings
        )
        publish = self._publish_traceback
        self._stall_watch = StallWatch(
            socket, self._folder, claim.spec.stall_s, disk=disk, publish_stacks=publish, settings=settings
        )
        self._lease = Lease(
            attempts, claim.ref, claim.lease_s, part.asked_at, extend=self._extend, tell=self._tell_of_lease
        )

    async def run(self) -> None:
        self._loop.add_signal_handler(signal.SIGINT, self._cause.end, "interrupted")
        self._loop.add_signal_handler(signal.SIGTERM, self._cause.end, "terminated")
        self._lease.start()
        await self._socket.start()
        exited = asyncio.create_task(self._group.wait())
        uploads = self._start(self._uploader.run())
        work = (
            self._limit_time(),
            self._limit_silence(),
            self._launch(),
            self._watch(exited),
            self._keep_files_fresh(),
            self._collector.run(),
            self._mirror.run(),
        )
        tasks = [self._start(each) for each in work]
        try:
            ending = await self._cause.first()
            await self._end_group(ending, exited)
            await self._socket.drain()
            await self._report(ending, exited.result(), uploads)
        finally:
            self._lease.end()
            for task in (*tasks, uploads):
                task.cancel()
            self._store.close()
            self._disk.close()

    def _extend(self, until: float) -> None:
        self._group.extend(until)
        self._socket.extend(until)

    def _tell_of_lease(self, news: News) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the part with it
            if isinstance(news, EndEarly):
                self._loop.call_soon_threadsafe(self._socket.end_early, news.reason)
            else:
                self._loop.call_soon_threadsafe(self._cause.on_news, news)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task beside the others; an unexpected exception ends the part."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._cause.check)
        return task

    async def _launch(self) -> None:
        """Write the spec, agree on a meeting point, start torchrun."""
        await asyncio.to_thread(self._mirror.fetch)
        manifest = await self._manifest()
        logs = self._socket.expect(self._claim.ranks)
        await self._disk.run(lambda: self._prepare(manifest, logs))
        if self._cause.is_decided:
            return
        try:
            meeting = await attempt_folder.agree(self._claim, self._folder, self._group.folder, self._order.address)
        except TimeoutError:
            said = "the leading host of the gang did not say where to meet; giving up"
            self._uploader.put(event_protocol.log_event(said))
            self._cause.end("exited")
            self._group.kill()
            return
        owner, digests = await retry_until(self._settings.report_within_s, gate_artifacts, self._store, self._claim)
        await self._disk.run(lambda: self._write(GATE_ARTIFACTS, orjson.dumps(digests)))
        self._start_torchrun(meeting, owner)

    def _start_torchrun(self, meeting: attempt_folder.Rendezvous, owner: str) -> None:
        order, claim, scratch = self._order, self._claim, self._group.folder / "scratch"
        scratch.mkdir(mode=0o700)
        secret, compiled = self._socket.admission.secret, compile_cache(owner)
        places = command.GroupPaths(self._layout.root, self._group.socket, secret, scratch, compiled)
        devices = order.devices.get(claim.share.pool, len(claim.share.devices))
        environment = command.rank_environment(
            claim,
            meeting,
            places,
            threads=threads_of_a_rank(devices),
            environment=os.environ,
            more=order.policy.environment,
        )
        write = [scratch, self._group.logs, meeting.folder, compiled]
        confinement = order.policy.confine(
            claim, self._layout, order.broker_url, read=[self._group.folder], write=write, owner=owner
        )
        arguments = command.torchrun_arguments(claim, meeting, self._group.logs, self._program)
        self._trace.note_launch()
        kind, ranks, work = claim.spec.kind, len(claim.share.devices), self._paths.work(claim.ref.attempt)
        self._group.launch(kind, arguments, environment, work, confinement, ranks=ranks)

    async def _manifest(self) -> list[Artifact]:
        return await retry_until(self._settings.claim_within_s, self._store.artifacts.list, self._claim.ref.job_id)

    def _prepare(self, manifest: list[Artifact], logs: list[RotatedLog]) -> None:
        """Make all files and folders of the ranks, and begin to listen, before they start."""
        make_files_of_ranks(self._paths, self._claim)
        if self._claim.leads:
            clear_unpublished(self._paths, manifest)
        self._record.open()
        for log in logs:
            log.open()
        self._collector.expect(self._claim.ranks)

    async def _limit_time(self) -> None:
        limit = self._claim.spec.timeout_s
        if limit is not None:
            await asyncio.sleep(limit)
            self._cause.end("timeout")

    async def _limit_silence(self) -> None:
        if await self._stall_watch.wait_for_stall():
            self._cause.end("stalled")

    async def _watch(self, exited: asyncio.Task[int]) -> None:
        await asyncio.wait({exited})
        self._cause.end("lease_expired" if exited.result() != 0 and self._lease.is_over else "exited")

    async def _keep_files_fresh(self) -> None:
        while True:
            await asyncio.sleep(self._settings.write_interval_s)
            await self._write_files()

    async def _write_files(self) -> None:
        files: list[GrowingFile | RotatedLog] = [self._record, *self._socket.files]
        for file in files:
            await self._disk.run(file.write)

    async def _end_group(self, ending: Ending, exited: asyncio.Task[int]) -> None:
        """End all processes, politely if there is time."""
        if ending == "rank_failed":
            await asyncio.wait({exited}, timeout=self._settings.torchrun_ends_s)
            self._socket.kill()
            await asyncio.wait({exited}, timeout=self._settings.torchrun_reports_s)
        elif ending in ("stop", "timeout", "interrupted", "terminated") and self._socket.stop():
            urgent = asyncio.create_task(self._cause.urgent.wait())
            await asyncio.wait({exited, urgent}, timeout=self._order.stop_grace_s, return_when="FIRST_COMPLETED")
            urgent.cancel()
        self._ended_here = not exited.done()
        self._group.kill()
        await exited

    async def _report(self, ending: Ending, launcher_code: int, uploads: asyncio.Task[None]) -> None:
        """Report everything that the part produced, then its end; the lease is renewed meanwhile.

        A lost attempt reports only a success, which counts unless another attempt has begun.
        """
        await self._report_output(uploads)
        evidence = await self._gather_evidence(ending, launcher_code)
        outcome = judge(evidence)
        if ending in _NOT_THE_RANKS and launcher_code == 0:  # they had finished before that could affect them
            whole = judge(replace(evidence, cause="exited", launcher_code=0))
            outcome = whole if whole.status == "succeeded" else outcome
        outcome = self._mirror.judge(outcome)
        self._trace.note_end(outcome, self._socket.errors)
        if outcome.status == "failed" and len(self._claim.shares) > 1 and may_be_aftermath(evidence):
            await let_others_speak_first(self._store.attempts, self._claim, self._settings, self._cause)
        if outcome.status == "failed" and may_be_the_end_of_all(evidence):
            await let_a_killer_finish(self._settings)
        if self._cause.is_lost and outcome.status != "succeeded":
            return
        registry = SupervisorRegistry(self._layout.host(self._order.host))
        await asyncio.to_thread(registry.note_report, self._claim.ref)
        try:
            await self._uploader.tell_of_result(outcome.result if outcome.status == "succeeded" else None)
            await retry_until(self._settings.report_within_s, self._store.attempts.finish, self._claim.ref, outcome)
        except Superseded as refusal:
            logger.info("the reported end was refused: %s", refusal)
            return
        if len(self._claim.shares) == 1:
            await self._tidy(is_last=outcome.status == "succeeded")

    async def _tidy(self, *, is_last: bool) -> None:
        """Remove what nobody reads any more; ``is_last`` if the job has no further attempt."""
        ref = self._claim.ref
        await self._disk.run(lambda: tidy(self._paths, ref.attempt, self._claim.ranks))
        if is_last:
            await self._disk.run(lambda: compact(self._paths, ref.attempt))
            with contextlib.suppress(StoreUnavailable):
                manifest = await asyncio.to_thread(self._store.artifacts.list, ref.job_id)
                await self._disk.run(lambda: share_contents(self._paths, manifest))

    async def _report_output(self, uploads: asyncio.Task[None]) -> None:
        """Report the events, files and output of the ranks and of torchrun; a lost attempt only keeps them."""
        if output := self._group.output():
            await self._disk.run(lambda: self._write(f"launcher.{self._order.host}.log", output))
        if not self._cause.is_lost:
            for event in self._socket.errors:
                if event["traceback"] and event["rank"] is not None:
                    self._publish_traceback(event["rank"], event["traceback"])
            await self._take_the_rest()
        await self._write_files()
        if not self._cause.is_lost:
            await asyncio.to_thread(self._mirror.finish)
        self._uploader.close()
        await asyncio.wait({uploads})

    async def _take_the_rest(self) -> None:
        """Take the rest of the ranks' events, as far as they can be read before somebody asks for the end."""

        async def take() -> None:
            await self._collector.finish()
            await self._publisher.drain()
            if self._publisher.beyond_limits and len(self._claim.shares) == 1:
                manifest = await self._manifest()
                await self._disk.run(lambda: clear_unpublished(self._paths, manifest))

        taking, asked = asyncio.create_task(take()), asyncio.create_task(self._cause.asked.wait())
        await asyncio.wait({taking, asked}, return_when="FIRST_COMPLETED")
        await asyncio.wait({taking}, timeout=self._order.stop_grace_s)
        asked.cancel()
        if taking.cancel():
            self._publisher.give_up()
            said = "some reports and artifacts of the ranks were not read: the attempt had to end before"
            self._uploader.put(event_protocol.log_event(said))
        else:
            taking.result()

    async def _gather_evidence(self, ending: Ending, launcher_code: int) -> Evidence:
        socket = self._socket
        leads, found = 0 in socket.ranks, [LeftResult()]
        work = self._paths.work(self._claim.ref.attempt)
        if leads:
            await self._disk.run(lambda: found.append(LeftResult.read(work)))
        return Evidence(
            cause="lease_expired" if ending == "lost" else ending,
            launcher_code=None if self._ended_here else launcher_code,
            exit_codes=self._group.exit_codes(),
            errors=socket.errors,
            terminated=socket.terminated,
            silent=socket.silent,
            ranks=len(self._claim.share.devices),
            done=sum(rank.done for rank in socket.ranks.values()),
            oom_kills=oom_kills() - self._oom_kills,
            tails=socket.tails,
            launcher_tail=self._group.last_output(),
            leads=leads,
            result=found[-1].result,
            odd_result=found[-1].odd,
            timeout_s=self._claim.spec.timeout_s,
            stall_s=self._claim.spec.stall_s,
            hanging=self._stall_watch.hanging,
            fault=self._cause.fault,
            attempt=self._claim.ref.attempt,
        )

    def _take(self, event: Event) -> None:
        """Take an event that a rank reported and recorded."""
        self._trace.take(event)
        if event["type"] == "artifact":
            self._publisher.publish(cast(ArtifactEvent, event))
        elif event["type"] not in RECORDED_ONLY:
            self._uploader.relay(event)

    async def _recover(self, first: Event | None) -> None:
        """Relay the unrelayed metrics of earlier attempts; ``first`` is the first metric of this one."""
        if self._claim.ref.attempt == 1 or 0 not in self._socket.ranks:
            return
        ref, attempts = self._claim.ref, self._paths.attempts
        try:
            found = await retry_until(self._settings.claim_within_s, find_unrelayed, self._store, ref, attempts, first)
        except StoreUnavailable as outage:
            logger.warning("events that earlier attempts did not relay stay on disk: %s", outage)
            return
        for event in found:
            await self._uploader.room()
            self._uploader.relay(cast(Event, event))

    def _publish_traceback(self, rank: int, text: str) -> None:
        self._publisher.publish_text(rank, traceback_name(self._claim.ref.attempt, rank), text)

    def _write(self, name: str, content: bytes) -> None:
        with Folder.open(self._folder) as attempt:
            attempt.write(name, content)
