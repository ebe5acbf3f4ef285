"""Servers that speak S3's protocol, on loopback, for tests: moto, in this process or its own, and nginx.

    server = start_moto()               moto's HTTP server in a process of its own; `server.stop()` ends it
    server = start_nginx(folder)        moves bytes as fast as a server can: PUT, GET, HEAD and DELETE, unsigned

Each has a fixture, to be imported into a test's module or conftest: `moto_server` and `nginx_server` give a server that
lasts for the session, `moto_bucket` a new bucket on it, `moto_in_process` boto3 answered without any server. They skip,
with the reason, if a program or library is missing.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

START_S_MAX = 120.0
STOP_S_MAX = 10.0
ACCESS_KEY_ID = "testing-key-id"
SECRET_ACCESS_KEY = "testing-secret"
REGION = "us-east-1"

_NGINX_TRIES = 5
_bucket_numbers = itertools.count(1)
_making_clients = threading.Lock()


@functools.cache
def _session() -> Any:
    """Return boto3's session for tests. A new one reads megabytes of JSON, and holds the interpreter lock meanwhile."""
    import boto3

    return boto3.session.Session()


@dataclass(slots=True)
class S3Server:
    """A server on loopback.

    Args:
        url: Its endpoint, as `endpoint_url` takes it.
        process: The process.
    """

    url: str
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.rpartition("/")[2].partition(":")
        return host, int(port)

    def settings(self, bucket: str, **changes: object) -> dict[str, object]:
        """Return the YAML entry of an s3 tier in one of the server's buckets."""
        entry: dict[str, object] = {
            "type": "s3",
            "bucket": bucket,
            "endpoint_url": self.url,
            "region": REGION,
            "addressing": "path",
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
        }
        return {**entry, **changes}

    def client(self, verify: str | bool | None = None) -> Any:
        """Return boto3's client for the server; `verify` is a file of authorities for TLS, or False.

        boto3 makes its class at run time, so a type checker does not know it.
        """
        with _making_clients:  # a session is for one thread at a time
            return _session().client(
                "s3",
                endpoint_url=self.url,
                region_name=REGION,
                aws_access_key_id=ACCESS_KEY_ID,
                aws_secret_access_key=SECRET_ACCESS_KEY,
                verify=verify,
            )

    def make_bucket(self) -> str:
        """Make a bucket of a new name."""
        name = f"bucket-{os.getpid()}-{next(_bucket_numbers)}"
        client = self.client()
        try:
            client.create_bucket(Bucket=name)
        finally:
            client.close()
        return name

    def damage(self, bucket: str, part: str) -> None:
        """Flip a bit in the last byte of every object with `part` in its name, as any client could."""
        client = self.client()
        try:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
            for name in [entry["Key"] for page in pages for entry in page.get("Contents", ())]:
                if part in name:
                    data = bytearray(client.get_object(Bucket=bucket, Key=name)["Body"].read())
                    data[-1] ^= 0x01
                    client.put_object(Bucket=bucket, Key=name, Body=bytes(data))
        finally:
            client.close()

    def freeze(self) -> None:
        """Stop the process (SIGSTOP), with its connections open."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue the process (SIGCONT)."""
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the server, by force if it does not end by itself."""
        self.thaw()
        self.process.terminate()
        try:
            self.process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(STOP_S_MAX)
        if self.process.stdout is not None:
            self.process.stdout.close()


def missing_for_moto() -> str:
    """Return why moto's server cannot be started here, or an empty string."""
    missing = [name for name in ("boto3", "moto", "flask") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)} (pip install 'moto[server]' boto3)" if missing else ""


def start_moto(certificate: tuple[Path, Path] | None = None) -> S3Server:
    """Start moto's server on a free port, and return once it listens.

    Args:
        certificate: A certificate and its key, PEM files, for TLS; plain HTTP without.

    Raises:
        RuntimeError: It did not start within `START_S_MAX`.
    """
    files = [str(path) for path in certificate or ()]
    process = subprocess.Popen(
        [sys.executable, "-c", _MOTO_PROGRAM, *files],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    scheme = "https" if certificate else "http"
    server = S3Server("", process)
    try:
        server.url = f"{scheme}://127.0.0.1:{_printed_port(process)}"
    except BaseException:
        server.stop()
        raise
    return server


def start_nginx(folder: Path) -> S3Server:
    """Start nginx on a free port, with its files in `folder`, and return once it listens.

    A bucket is a folder that the first PUT makes. It knows neither listings nor signatures.

    Raises:
        RuntimeError: It did not start within `START_S_MAX`.
    """
    program = _nginx()
    assert program is not None, "nginx is not installed"
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for _ in range(_NGINX_TRIES):
        port = _free_port()
        configuration = folder / "nginx.conf"
        configuration.write_text(_NGINX_CONFIGURATION.format(port=port, user="user root;" if os.geteuid() == 0 else ""))
        process = subprocess.Popen(
            [program, "-p", str(folder), "-c", str(configuration), "-e", str(folder / "error.log")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        server = S3Server(f"http://127.0.0.1:{port}", process)
        if _listens(process, port):
            return server
        server.stop()
    raise RuntimeError("nginx did not start; see its error.log")


# Fixtures.


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    """moto's server, in a process of its own, for the session."""
    if missing := missing_for_moto():
        pytest.skip(missing)
    server = start_moto()
    yield server
    server.stop()


@pytest.fixture
def moto_bucket(moto_server: S3Server) -> str:
    """The name of a new bucket on `moto_server`."""
    return moto_server.make_bucket()


@pytest.fixture(scope="session")
def nginx_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """nginx, for the session."""
    if _nginx() is None:
        pytest.skip("nginx is not installed (apt-get install nginx-light)")
    server = start_nginx(tmp_path_factory.mktemp("nginx"))
    yield server
    server.stop()


@pytest.fixture
def moto_in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """boto3's client answered by moto within this process: for code that calls boto3, no server and no socket."""
    if missing := missing_for_moto():
        pytest.skip(missing)
    import boto3
    from moto import mock_aws

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY)
    with mock_aws():
        client = boto3.session.Session().client("s3", region_name=REGION)
        yield client
        client.close()


# Starting them.

_MOTO_PROGRAM = """
import logging, sys
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

class Handler(MotoRequestHandler):
    protocol_version = "HTTP/1.1"  # as S3 has it; but werkzeug closes every connection after one answer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = make_server(
    "127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True, request_handler=Handler,
    ssl_context=tuple(sys.argv[1:3]) or None,
)
print(server.port, flush=True)
server.serve_forever()
"""

_NGINX_CONFIGURATION = """
daemon off;
{user}
worker_processes 1;
pid nginx.pid;
error_log error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  sendfile on;
  tcp_nodelay on;
  keepalive_requests 10000000;
  client_max_body_size 0;
  client_body_buffer_size 8m;
  client_body_temp_path temp_body;
  proxy_temp_path temp_proxy;
  fastcgi_temp_path temp_fastcgi;
  uwsgi_temp_path temp_uwsgi;
  scgi_temp_path temp_scgi;
  server {{
    listen 127.0.0.1:{port};
    root data;
    location / {{
      dav_methods PUT DELETE;
      create_full_put_path on;
    }}
  }}
}}
"""


def _nginx() -> str | None:
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def _printed_port(process: subprocess.Popen[bytes]) -> int:
    """Return the number that the process prints as its first line."""
    assert process.stdout is not None
    line = b""
    end = time.monotonic() + START_S_MAX
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
        received = os.read(process.stdout.fileno(), 16) if ready else b""
        if not received:
            raise RuntimeError("moto's server did not start")
        line += received
    return int(line)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _listens(process: subprocess.Popen[bytes], port: int) -> bool:
    """Return True once a process listens on `port`, False if the process has ended or takes too long."""
    end = time.monotonic() + START_S_MAX
    while process.poll() is None and time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.01)
        else:
            return True
    return False
