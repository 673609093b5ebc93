"""The embedded broker: where its socket is, and what is said of one that does not start."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from service.jobs.embedded import BrokerError, EmbeddedBroker


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


def test_a_broker_that_ends_within_its_own_start_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "server"
    program.write_text("#!/bin/sh\necho first\necho out of luck\nexit 3\n")
    program.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr("service.jobs.embedded._find_server", lambda: program)
        with pytest.raises(BrokerError, match=r"exited with 3: first \| out of luck"):
            EmbeddedBroker.start(tmp_path / "broker", ready_within_s=120)
    with EmbeddedBroker.start(tmp_path / "broker") as broker:  # the folder's lock is free again
        assert redis.Redis.from_url(broker.url).ping()
