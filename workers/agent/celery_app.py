"""Celery as Trivet uses it: a transport that carries ``launch`` messages to a host, and nothing else.

A message is acknowledged before it runs, which takes milliseconds. The store's outbox recovers a lost message,
never Celery's redelivery. Workers run nothing but :data:`TASK`, with JSON arguments.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

from celery import Celery, signals
from celery.apps.worker import Worker

from service.jobs.records import AttemptRef
from service.jobs.settings import tls_options
from service.jobs.store.acl import CELERY_PREFIX

TASK = "trivet.launch"
_TIMEOUT_S = 2.0
_THREADS = 4

Launch = Callable[[AttemptRef], None]


def _queue_of(host: str) -> str:
    """Return the name of the queue that only this host's worker reads."""
    return f"host.{host}"


def celery_url(broker_url: str) -> str:
    """Return the store's URL in Celery's spelling: ``unix:///path?db=1`` becomes
    ``redis+socket:///path?virtual_host=1``, without the options of TLS, which Celery takes separately.
    """
    parts = urlsplit(broker_url)
    if parts.scheme != "unix":
        return urlunsplit(parts._replace(query=""))
    if parts.username or parts.password:
        raise ValueError("Celery cannot log in over a unix socket: use a redis:// URL, or a socket without a password")
    database = parse_qs(parts.query).get("db", ["0"])[0]
    return f"redis+socket://{parts.path}?virtual_host={database}"


def create_app(broker_url: str) -> Celery:
    """Return a client of the transport; it connects on first use.

    By default the transport accepts any certificate, so it gets the same options as the store's clients.
    """
    app = Celery("trivet", broker=celery_url(broker_url), set_as_current=False)
    app.conf.update(
        broker_use_ssl=tls_options(broker_url),
        accept_content=["json"],
        task_serializer="json",
        task_ignore_result=True,
        task_publish_retry=False,
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_connection_timeout=_TIMEOUT_S,
        broker_transport_options={
            "global_keyprefix": CELERY_PREFIX,
            "socket_timeout": _TIMEOUT_S * 2,
            "socket_connect_timeout": _TIMEOUT_S,
            "socket_keepalive": True,
            "health_check_interval": 10,
            "max_retries": 1,
        },
    )
    return app


class Dispatcher:
    """Sends launches."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def send(self, ref: AttemptRef) -> None:
        """Put a launch into the queue of its host; raises Celery's ``OperationalError`` when the broker is away."""
        arguments = [ref.job_id, ref.attempt, ref.host]
        self._app.send_task(TASK, args=arguments, queue=_queue_of(ref.host), retry=False, ignore_result=True)


def serve(app: Celery, host: str, launch: Launch) -> None:
    """Run this host's consumer in the calling (main) thread until SIGTERM or SIGINT. ``launch`` must return soon."""

    @app.task(name=TASK)
    def _launch(job_id: str, attempt: int, host: str) -> None:
        launch(AttemptRef(job_id, int(attempt), host))

    warnings.filterwarnings("ignore", "You're running the worker with superuser")
    worker: Any = Worker(
        app=app,
        hostname=f"trivet@{host}",
        queues=[_queue_of(host)],
        pool="threads",
        concurrency=_THREADS,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        quiet=True,
        loglevel=logging.WARNING,
    )

    def look(**_: Any) -> None:  # the loop, which sleeps up to a second between checks whether to stop
        if (hub := getattr(worker, "hub", None)) is not None:
            threading.Thread(target=hub.call_soon, args=(lambda: None,), daemon=True).start()

    signals.worker_shutting_down.connect(look, weak=False)
    try:
        worker.start()
    except SystemExit as goodbye:
        if goodbye.code:
            raise
