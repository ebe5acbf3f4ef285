"""Servers that speak S3's protocol on loopback: moto's, in another process.

Import the fixtures into a test's module or conftest: `moto_server` lasts for the session, `moto_bucket` is a new bucket
on it. They skip, with the reason, if a package is not installed.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.testing.server_process import ServerProcess

ACCESS_KEY_ID = "testing-key-id"
SECRET_ACCESS_KEY = "testing-secret"
REGION = "us-east-1"

_bucket_numbers = itertools.count(1)
_making_clients = threading.Lock()


@functools.cache
def _session() -> Any:
    """Return boto3's session. A new one reads megabytes of JSON, and holds the interpreter lock meanwhile."""
    import boto3

    return boto3.session.Session()


class S3Server(ServerProcess):
    """A server that speaks S3's protocol.

    Args:
        command: Returns the command of a server on a port.
        scheme: `http` or `https`.
    """

    def __init__(self, command: Callable[[int], list[str]], scheme: str = "http") -> None:
        super().__init__()
        self._command = command
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        """The value of `endpoint_url`."""

    def command(self) -> list[str]:
        return self._command(self.port)

    def answers(self) -> bool:
        try:
            socket.create_connection(self.address, 1.0).close()
        except OSError:
            return False
        return True

    def client(self, verify: str | bool | None = None) -> Any:
        """Return boto3's client for the server; `verify` is a file of authorities for TLS, or False."""
        with _making_clients:  # one thread at a time may use a session
            return _session().client(
                "s3",
                endpoint_url=self.url,
                region_name=REGION,
                aws_access_key_id=ACCESS_KEY_ID,
                aws_secret_access_key=SECRET_ACCESS_KEY,
                verify=verify,
            )

    def make_bucket(self) -> str:
        """Make a bucket with a new name."""
        name = f"bucket-{os.getpid()}-{next(_bucket_numbers)}"
        with closing(self.client()) as client:
            client.create_bucket(Bucket=name)
        return name


def missing_for_moto() -> str:
    """Return why moto's server cannot be started, or an empty string."""
    missing = [name for name in ("boto3", "moto", "flask") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)} (pip install 'moto[server]' boto3)" if missing else ""


def start_moto(certificate: tuple[Path, Path] | None = None) -> S3Server:
    """Start moto's server on a free port; with TLS if a certificate and its key, PEM files, are given."""
    files = [str(path) for path in certificate or ()]
    server = S3Server(
        lambda port: [sys.executable, "-c", _MOTO_PROGRAM, str(port), *files], "https" if certificate else "http"
    )
    server.start()
    return server


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    """moto's server, for the session."""
    if missing := missing_for_moto():
        pytest.skip(missing)
    server = start_moto()
    yield server
    server.stop()


@pytest.fixture
def moto_bucket(moto_server: S3Server) -> str:
    """The name of a new bucket on `moto_server`."""
    return moto_server.make_bucket()


_MOTO_PROGRAM = """
import logging, sys
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

class Handler(MotoRequestHandler):
    protocol_version = "HTTP/1.1"  # as S3's; but werkzeug closes every connection after one answer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = make_server(
    "127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=True,
    request_handler=Handler, ssl_context=tuple(sys.argv[2:4]) or None,
)
server.serve_forever()
"""
