"""A data folder whose path is too long for a socket address still gets a broker, and leaves nothing elsewhere."""

from __future__ import annotations

from pathlib import Path

import redis

from service.jobs.embedded import EmbeddedBroker


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
