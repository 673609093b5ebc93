"""``python -m api``: the API server."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from pydantic import ValidationError

from api.deliveries import has_wandb
from api.main import connect, create_app
from api.offload import Apart
from api.server.serving import ApiServer, limited
from service.jobs.files.objects import ObjectStoreError
from service.jobs.host import ENV_PREFIX, NotPrivateError, PrivateSocket, bind_port, close_to_others, url_of
from service.jobs.settings import LOOPBACK, Settings
from service.jobs.store import Store, StoreUnavailable
from service.jobs.text import log_to_stderr, visible

_SHUTDOWN_S = 5


@dataclass(frozen=True)
class _InheritedDescriptors:
    """The descriptors that the parent process opened for this one. Sockets that the parent keeps open lose no
    connection while this process restarts: connections wait there.
    """

    listening: int | None
    private: int | None
    ready: int | None
    """This process writes a byte there once it answers."""

    def listening_socket(self, settings: Settings) -> socket.socket:
        """Return the socket of the API's address, bound here if it is not inherited."""
        if self.listening is None:
            return bind_port(settings.host, settings.port)
        return socket.socket(fileno=self.listening)

    def private_socket(self, settings: Settings, url: str) -> PrivateSocket | None:
        """Return the data folder's socket, bound here if it is not inherited."""
        if self.private is None:
            return PrivateSocket.bind(settings.layout, url)
        return PrivateSocket(socket.socket(fileno=self.private), settings.layout)


def main(arguments: list[str] | None = None) -> int:
    """Serve until a signal. Return 2 if it refuses to start, and say why."""
    options = vars(_parser().parse_args(arguments))
    inherited = _InheritedDescriptors(options.pop("fd"), options.pop("private_fd"), options.pop("ready_fd"))
    given = {name: value for name, value in options.items() if value is not None}
    try:
        settings = Settings(**given)
        _ = settings.broker_url  # reads the files that it names
    except (ValidationError, OSError) as error:
        return _refuse(str(error))
    if reason := _exposure(settings) or _missing_package(settings):
        return _refuse(reason)
    try:
        was_open = close_to_others(settings.layout.root)
    except NotPrivateError as error:
        return _refuse(str(error))
    layout = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    log_to_stderr(settings.log_level, layout, settings.log_format, process="api")
    if was_open:
        logging.getLogger("api").warning("closed %s to other users, who could read it", settings.layout.root)
    store = connect(settings)
    try:
        if store.artifacts.objects is not None:
            store.artifacts.objects.try_out()
        _announce_admin_key(settings, store)
        _warn_of_forgetting(store)
    except (StoreUnavailable, ObjectStoreError) as error:
        remedy = f"; set {ENV_PREFIX}REDIS_URL, or run 'trivet up', which starts a broker itself"
        return _refuse(f"{error}{remedy}" if type(error) is StoreUnavailable else str(error))
    try:
        listening = inherited.listening_socket(settings)
    except OSError as error:
        return _refuse(f"cannot bind {settings.host}:{settings.port}: {error.strerror}")
    return _serve(settings, store, listening, inherited)


def _exposure(settings: Settings) -> str | None:
    """Return why the API will not bind this address; ``None`` if it will."""
    if settings.host in LOOPBACK or settings.behind_proxy or settings.tls_cert is not None:
        return None
    return (
        f"refusing to bind {settings.host} without encryption: API keys would cross the network in the clear. "
        "Give --tls-cert and --tls-key, or --behind-proxy if a proxy in front ends TLS, or bind 127.0.0.1."
    )


def _missing_package(settings: Settings) -> str | None:
    """Return what an export of every job needs and is not installed; ``None`` if there is no such thing."""
    if settings.export_wandb is None or has_wandb():
        return None
    return f"{ENV_PREFIX}EXPORT_WANDB needs W&B's package: pip install 'trivet[wandb]'"


def _announce_admin_key(settings: Settings, store: Store) -> None:
    """Write the admin key, on the very first start, to its file, readable by its owner only."""
    secret = store.keys.ensure_admin()
    if secret is None:
        return
    path = settings.admin_key_path
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret + "\n")
    print(f"the admin key was written to {path}", file=sys.stderr)


def _warn_of_forgetting(store: Store) -> None:
    if store.forgets_at_restart():
        logging.getLogger("api").warning(
            "the broker keeps nothing on disk: a restart loses every job and key; "
            "set 'appendonly yes' and 'appendfsync always' there"
        )


def _serve(settings: Settings, store: Store, listening: socket.socket, inherited: _InheritedDescriptors) -> int:
    config = uvicorn.Config(
        create_app(settings, store, Apart()),
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        http=limited(settings.request_head_s, settings.request_body_s, settings.response_read_s),
        ws="none",
        proxy_headers=settings.behind_proxy,
        forwarded_allow_ips=settings.proxies,
        server_header=False,
        log_config=None,
        log_level=settings.log_level,
        access_log=settings.log_level == "debug",
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    url = url_of(listening, tls=settings.tls_cert is not None)
    server = ApiServer(config, inherited.private_socket(settings, url), inherited.ready)
    logging.getLogger("api").info("serving %s", url)
    server.run(sockets=[listening])
    return 0 if server.started else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m api", description="The Trivet API; settings are TRIVET_… variables."
    )
    parser.add_argument("--host", help="address to bind")
    parser.add_argument("--port", type=int, help="port to bind; 0 takes a free one")
    parser.add_argument("--fd", type=int, help="an already bound socket to serve instead")
    parser.add_argument("--private-fd", type=int, help="the data folder's socket, already bound")
    parser.add_argument("--ready-fd", type=int, help="where to write a byte once requests are answered")
    parser.add_argument("--behind-proxy", action="store_true", default=None, help="a proxy in front ends TLS")
    parser.add_argument("--tls-cert", type=Path, help="certificate chain, PEM")
    parser.add_argument("--tls-key", type=Path, help="private key, PEM")
    return parser


def _refuse(reason: str) -> int:
    print(visible(reason, lines=True), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
