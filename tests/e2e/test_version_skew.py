"""An upgrade under running jobs: API and workers of this version and of the last one that spoke otherwise to the store
serve each other, and what the older one runs goes on under the newer one.
"""

from __future__ import annotations

import compileall
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from functools import cached_property
from io import BytesIO
from pathlib import Path

import pytest
from digits import digits_job
from local_service import give_way
from ports import free_port
from waiting import LIMIT_S, eventually

from service.jobs.files import DataLayout
from service.jobs.host.embedded_broker import EmbeddedBroker
from service.jobs.records import Job
from trivet import Client, Refused, Unreachable

ROOT = Path(__file__).parents[2]
STORE = "service/jobs/store"
pytestmark = [pytest.mark.slow(30), pytest.mark.distributed]
SPEC = digits_job(64, steps=20, batch={"global": 64}, parallel={"dp_shard": 2}, device="cpu")


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources as they were before the newest commit that changed what API and workers say to the store."""
    try:
        commit = git("log", "-1", "--format=%H", "--", STORE).decode().strip()
        archive = git("archive", f"{commit}^", "service", "workers", "api", "trivet")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the sources of the last version are in the history of the repository, which is not here: {error}")
    folder = tmp_path_factory.mktemp("older")
    with tarfile.open(fileobj=BytesIO(archive)) as sources:
        sources.extractall(folder, filter="data")
    assert (folder / STORE).is_dir()
    compileall.compile_dir(folder, quiet=2)  # once, and not by each process that imports it
    return folder


class Site:
    """An API and a worker, each of either version, over one broker and one data folder."""

    def __init__(self, folder: Path, broker: str) -> None:
        self._folder, self._broker = folder, broker
        self._port = free_port()
        self._parts: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, part: str, sources: Path) -> None:
        """Start the ``api`` or the ``workers``, in the place of one that runs."""
        self.stop(part)
        outer = {name: value for name, value in os.environ.items() if not name.startswith("TRIVET_")}
        settings = {
            "TRIVET_DATA": str(self._folder),
            "TRIVET_REDIS_URL": self._broker,
            "TRIVET_CPU_SLOTS": "3",
            "TRIVET_WORKER_NAME": "here",
            "TRIVET_WARM_SUPERVISORS": "0",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = ["trivet", "api", "--port", str(self._port)] if part == "api" else ["workers"]
        with self._folder.with_suffix(f".{part}.log").open("ab") as log:
            self._parts[part] = subprocess.Popen(
                [sys.executable, "-m", *command],
                env={**outer, **settings, "PYTHONPATH": str(sources)},
                cwd=sources,
                stdout=log,
                stderr=log,
            )
        if part == "api":
            eventually(self._answers)

    def _answers(self) -> bool:
        assert self._parts["api"].poll() is None, self._folder.with_suffix(".api.log").read_text()
        try:
            return bool(self.client.hosts() or True)
        except (OSError, Refused, Unreachable):
            return False

    @cached_property
    def client(self) -> Client:
        """Of whatever API runs, once the first one has."""
        return Client(f"http://127.0.0.1:{self._port}", DataLayout(self._folder).admin_key.read_text().strip())

    def ended(self, job: Job) -> Job:
        return eventually(lambda: now if (now := self.client.job(job.id)).ended_at is not None else None)

    def runs_on(self) -> Job:
        """An endless job of one rank that has taken steps."""
        job = self.client.submit({**SPEC, "steps": 10**6, "parallel": {}})
        eventually(lambda: self.done(job))
        give_way(job.id)
        return job

    def cancels(self, job: Job) -> None:
        """End a job that its host says to run."""
        (host,) = self.client.hosts()
        assert (host.name, host.running) == ("here", (job.id,))
        self.client.cancel(job.id)
        assert self.ended(job).state == "cancelled", self.said()

    def runs_a_job(self) -> None:
        """Submit one, and see it end well at once."""
        ended = self.ended(self.client.submit(SPEC))
        assert (ended.state, ended.attempt) == ("succeeded", 1), self.said()

    def done(self, job: Job) -> int:
        """The steps that its ranks have told of."""
        progress = self.client.job(job.id).progress
        return 0 if progress is None else progress.done

    def stop(self, part: str) -> None:
        if part in self._parts:
            process = self._parts.pop(part)
            process.terminate()
            process.wait(LIMIT_S)

    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self._folder.parent.glob(f"{self._folder.name}.*.log")))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with EmbeddedBroker.start(tmp_path / "broker") as broker:
        site = Site(tmp_path / "data", broker.url)
        yield site
        site.stop("workers")
        site.stop("api")


def test_an_upgrade_touches_no_running_job_and_the_two_versions_serve_each_other(site: Site, older: Path) -> None:
    """First the API, then the workers, as the page about deploying has it; and what ran is there to be read. Then the
    API goes back to the older version, which the newer workers serve.
    """
    site.start("api", older)
    site.start("workers", older)
    running = site.runs_on()
    site.start("api", ROOT)
    site.runs_a_job()
    site.start("workers", ROOT)
    done = site.done(running)
    eventually(lambda: site.done(running) > done)
    now = site.client.job(running.id)
    assert (now.state, now.attempt) == ("running", 1), site.said()
    site.cancels(running)
    site.start("api", older)
    site.runs_a_job()
    site.cancels(site.runs_on())
