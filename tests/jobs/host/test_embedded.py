"""The embedded broker: where its socket is, and what is said of one that does not start."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from service.jobs.host.embedded_broker import BrokerError, EmbeddedBroker


def test_a_long_path_has_its_socket_elsewhere_and_takes_it_away(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    broker = EmbeddedBroker.start(folder)
    elsewhere = broker.socket.parent
    assert elsewhere != folder
    assert redis.Redis.from_url(broker.url).ping()
    broker.stop()
    broker.stop()
    assert not elsewhere.exists()
    assert (folder / "appendonlydir").is_dir()


def test_a_short_path_has_its_socket_inside(tmp_path: Path) -> None:
    with EmbeddedBroker.start(tmp_path / "broker") as broker:
        assert broker.socket.parent == tmp_path / "broker"
    assert (tmp_path / "broker").is_dir()


@pytest.mark.slow
def test_a_broker_that_ends_within_its_own_start_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "server"
    program.write_text("#!/bin/sh\necho first\necho out of luck\nexit 3\n")
    program.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr("service.jobs.host.embedded_broker.find_server", lambda: program)
        with pytest.raises(BrokerError, match=r"exited with 3: first \| out of luck"):
            EmbeddedBroker.start(tmp_path / "broker", ready_within_s=120)
    with EmbeddedBroker.start(tmp_path / "broker") as broker:  # the folder's lock is free again
        assert redis.Redis.from_url(broker.url).ping()


def test_a_start_waits_until_the_data_is_read(tmp_path: Path) -> None:
    """The server answers INFO while it reads, and refuses every other command."""
    value = "v" * 1000
    with (
        EmbeddedBroker.start(tmp_path / "broker", fsync="everysec") as broker,
        redis.Redis.from_url(broker.url) as client,
    ):
        for block in range(50):
            client.mset({f"{block}:{number}": value for number in range(1000)})
    with (
        EmbeddedBroker.start(tmp_path / "broker", ready_within_s=120) as broker,
        redis.Redis.from_url(broker.url) as client,
    ):
        assert client.dbsize() == 50_000
        broker.process.kill()
        broker.process.wait()
        broker.restart(ready_within_s=120)
        assert client.dbsize() == 50_000


def test_a_server_that_reads_is_given_its_time_as_long_as_it_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = {"loading": "0", "redis_version": "7.2.4"}
    answers = [{"loading": "1", "loading_loaded_bytes": str(size)} for size in range(20)]
    moments = iter(range(1000))
    with EmbeddedBroker.start(tmp_path / "broker") as broker, monkeypatch.context() as patch:
        patch.setattr("service.jobs.host.embedded_broker.time.monotonic", lambda: float(next(moments)))
        for said, message in ((answers, None), ([answers[0]] * 20, "not ready within 5")):
            replies = iter([*said, ready])
            patch.setattr("service.jobs.host.embedded_broker._server_info", lambda _, replies=replies: next(replies))
            if message is None:
                broker._wait_until_ready(5.0)
            else:
                with pytest.raises(BrokerError, match=message):
                    broker._wait_until_ready(5.0)
