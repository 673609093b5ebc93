"""``python -m api.apart_server FD``: makes expensive answers for another API process (:mod:`api.offload.apart`).

It serves the socket FD, tells on standard output when it is ready, and ends when its standard input does. Requests that
the other process answers itself go first.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading

import uvicorn

from api.main import connect, create_app_apart
from api.server.serving import ApiServer
from service.jobs.settings import Settings
from service.jobs.text import log_to_stderr

_NICENESS = 5
_SHUTDOWN_S = 1


def main(descriptor: int) -> int:
    """Serve until standard input ends."""
    os.umask(0o077)
    os.nice(_NICENESS)
    settings = Settings()
    layout = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    log_to_stderr(settings.log_level, layout, settings.log_format, process="api apart")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    config = uvicorn.Config(
        create_app_apart(settings, connect(settings)),
        http="httptools",
        ws="none",
        proxy_headers=True,
        forwarded_allow_ips="*",  # only the process that started this one reaches the socket
        server_header=False,
        log_config=None,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    server = ApiServer(config, ready=sys.stdout.fileno())
    threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
    server.run(sockets=[socket.socket(fileno=descriptor)])
    return 0 if server.started else 1


def _end_with_input(server: ApiServer) -> None:
    sys.stdin.buffer.read()
    server.end()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
