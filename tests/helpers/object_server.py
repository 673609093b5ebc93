"""An S3-compatible server on a loopback port, for this process and those that it starts."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest


@contextmanager
def object_server() -> Iterator[str]:
    """Serve an empty bucket until the context is left; yield its URL. How to reach it is in the environment."""
    pytest.importorskip("s3fs", reason="trivet[store] is not installed")
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with mock.patch.dict(os.environ, variables):
        try:
            import s3fs

            with contextlib.suppress(FileExistsError):  # a call without an answer in time was made again
                s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
            yield "s3://bucket/trivet"
        finally:
            server.stop()
