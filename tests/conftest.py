"""Fixtures that every room shares: a real broker on a private socket, a clean database, a data directory, and groups of
ranks."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The vector instructions that the processor names are there: Inductor would try them out in a process of its own for
# each of them, with an import of PyTorch, at the first kernel of every process.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import lanes
import pytest
import redis as redis_py
from hypothesis import settings
from launching import fresh_torchrun, rank_servers, torchrun

from service.jobs.files import DataLayout, JobPaths
from service.jobs.host.embedded_broker import EmbeddedBroker

__all__ = ["broker", "data", "fresh_torchrun", "rank_servers", "redis", "torchrun"]


LIMIT_OF_SLOW_TESTS_S = 900.0


def pytest_configure(config: pytest.Config) -> None:
    """Say which command runs, for properties; let C++ be compiled once for all processes of the session."""
    lanes.leaves_slow_out = config.option.markexpr == "not slow"
    # How long an example takes says nothing where other processes have the cores.
    settings.register_profile("trivet", deadline=None, max_examples=lanes.examples(25, 100))
    settings.load_profile("trivet")
    compiler = shutil.which("g++")
    if compiler is None or "CXX" in os.environ:
        return
    scratch = tempfile.TemporaryDirectory(prefix="trivet-compiled-")
    config.add_cleanup(scratch.cleanup)
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    wrapper = Path(__file__).parent / "compilers" / "g++"
    for name, value in (("CXX", str(wrapper)), ("CXX_CACHED", compiler), ("CXX_CACHE", scratch.name)):
        patch.setenv(name, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests have a longer limit; those that start groups of ranks, the longest, come first, so that no process
    still has one to run when the others have ended."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LIMIT_OF_SLOW_TESTS_S))
    items.sort(key=lambda item: item.get_closest_marker("distributed") is None)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real server that lives as long as the test session."""
    with EmbeddedBroker.start(tmp_path_factory.mktemp("broker"), fsync="everysec") as server:
        yield server.url


@pytest.fixture(autouse=True)
def plain_umask() -> Iterator[None]:
    """Each test begins with a plain shell's umask; what closes a data folder to others sets one for good."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def redis(broker: str) -> Iterator[redis_py.Redis]:
    """A client of an empty database."""
    client = redis_py.Redis.from_url(broker)
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What receives the spans of this process, an ``OtlpReceiver``."""
    from otlp_receiver import otlp_receiver

    with otlp_receiver() as receiver:
        for name, value in receiver.variables.items():
            monkeypatch.setenv(name, value)
        yield receiver


@pytest.fixture
def data(tmp_path: Path) -> DataLayout:
    return DataLayout(tmp_path / "data")


@pytest.fixture
def paths(tmp_path: Path) -> JobPaths:
    """The folders of a job and of its first attempt."""
    paths = JobPaths(tmp_path / "job")
    for folder in (paths.artifacts, paths.attempt(1)):
        folder.mkdir(parents=True)
    return paths


@pytest.fixture(scope="session")
def parity() -> Path:
    """Networks with another verifier's bounds: data that is kept outside of the repository."""
    shared = Path(os.environ.get("TRIVET_SHARED", Path(__file__).parents[2] / "shared"))
    if not (shared / "parity").is_dir():
        pytest.skip("the parity data (TRIVET_SHARED/parity) is not on this machine; it is not part of the repository")
    return shared / "parity"
