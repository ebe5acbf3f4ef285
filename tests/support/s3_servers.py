"""Servers that speak S3's protocol on loopback, in other processes: moto's, and those whose programs are installed.

Import the fixtures into a test's module or conftest: `moto_server` lasts for the session, `moto_bucket` is a new bucket
on it. `installed_server` is each of `PROGRAMS`. They skip, with the reason, if a package or program is not installed.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.server_process import ServerProcess, free_port

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


def _seaweedfs(program: str, port: int, directory: Path) -> list[str]:
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": ACCESS_KEY_ID, "secretKey": SECRET_ACCESS_KEY}],
        "actions": ["Admin"],
    }
    (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = [f"-{role}.port={free_port()}" for role in ("master", "volume", "filer")]
    data = [f"-dir={directory}", "-volume.max=1000", "-master.volumeSizeLimitMB=64", "-volume.minFreeSpace=1"]
    s3 = ["-s3", f"-s3.port={port}", f"-s3.config={directory}/s3.json", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    return [program, "-logtostderr", "server", "-ip=127.0.0.1", *ports, *data, *s3]


def _rclone(program: str, port: int, directory: Path) -> list[str]:
    keys = ["--auth-key", f"{ACCESS_KEY_ID},{SECRET_ACCESS_KEY}"]
    return [program, "serve", "s3", "--addr", f"127.0.0.1:{port}", *keys, "--config", "", str(directory)]


def _nanio(program: str, port: int, directory: Path) -> list[str]:
    options = directory / "nanio.toml"
    options.write_text(f'[[users]]\naccess_key = "{ACCESS_KEY_ID}"\nsecret_key = "{SECRET_ACCESS_KEY}"\n')
    return [program, "serve", "--options", str(options), "--data-dir", str(directory), "--port", str(port)]


def _localbucket(program: str, port: int, directory: Path) -> list[str]:
    return [program, "--port", str(port), str(directory)]


def _swift(program: str, port: int, directory: Path) -> list[str]:
    python = Path(program).read_text().partition("\n")[0].removeprefix("#!").strip()  # the one that has Swift
    arguments = [str(port), str(directory), ACCESS_KEY_ID, SECRET_ACCESS_KEY]
    return [python, "-E", "-W", "ignore", "-c", _SWIFT_PROGRAM, *arguments]  # without the tests' own packages


def _radosgw(program: str, port: int, directory: Path) -> list[str]:
    arguments = [str(port), str(free_port()), str(directory), ACCESS_KEY_ID, SECRET_ACCESS_KEY]
    return ["sh", "-e", "-c", _CEPH_PROGRAM, program, *arguments]


PROGRAMS: Final[Mapping[str, Callable[[str, int, Path], list[str]]]] = {
    "weed": _seaweedfs,
    "rclone": _rclone,
    "nanio": _nanio,
    "localbucket": _localbucket,
    "swift-proxy-server": _swift,
    "radosgw": _radosgw,
}
"""Programs that speak S3's protocol, found on the path or beside Python; the command has a port and a directory."""

_NEEDS: Final[Mapping[str, tuple[str, ...]]] = {"radosgw": ("ceph-mon", "ceph-osd")}
"""The other programs that a server of `PROGRAMS` is made of."""


def _found(program: str) -> str | None:
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)))
    return shutil.which(program, path=path)


def start_program(name: str, directory: Path) -> S3Server:
    """Start a server of `PROGRAMS`; return once it stores an object."""
    program = _found(name)
    assert program is not None, f"{name} is not installed"
    server = S3Server(lambda port: PROGRAMS[name](program, port, directory))
    server.start()
    end = time.monotonic() + server.start_s_max
    with closing(server.client()) as client:
        while True:  # some answer before they are ready
            try:
                with suppress(client.exceptions.ClientError):  # it was made before
                    client.create_bucket(Bucket="ready")
                client.put_object(Bucket="ready", Key="ready", Body=b"ready")
                return server
            except Exception:  # any of boto3's
                if time.monotonic() > end:
                    server.kill()
                    raise
                time.sleep(0.2)


@pytest.fixture(scope="session", params=PROGRAMS)
def installed_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Each server of `PROGRAMS`, for the session."""
    name: str = request.param
    if missing := [each for each in (name, *_NEEDS.get(name, ())) if _found(each) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    server = start_program(name, tmp_path_factory.mktemp(name))
    yield server
    server.kill()  # one of them needs half a minute to stop


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
# S3 alone: to find the service of each request took 2.5 of its 6.3 ms of processor time.
import logging, sys
from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

class Handler(MotoRequestHandler):
    protocol_version = "HTTP/1.1"  # as S3's; but werkzeug closes every connection after one answer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = make_server(
    "127.0.0.1", int(sys.argv[1]), create_backend_app("s3"), threaded=True, request_handler=Handler,
    ssl_context=tuple(sys.argv[2:4]) or None,
)
server.serve_forever()
"""

_SWIFT_PROGRAM = """
# All servers of a small OpenStack Swift in one process, and a dictionary in place of memcached.
import eventlet
eventlet.monkey_patch()
import os, sys
from eventlet import wsgi
from swift.common import utils
from swift.common.http_protocol import SwiftHttpProtocol
from swift.common.ring import RingBuilder
from swift.common.wsgi import loadapp

port, root, key_id, secret = int(sys.argv[1]), *sys.argv[2:]
utils.HASH_PATH_SUFFIX = utils.HASH_PATH_PREFIX = b"tests"
quiet = open(os.devnull, "w")
os.makedirs(root + "/devices/d1", exist_ok=True)


class Cache(dict):
    def __bool__(self):
        return True

    def get(self, key, *_, **__):
        return super().get(key)

    def get_multi(self, keys, *_, **__):
        return [self.get(key) for key in keys]

    def set(self, key, value, *_, **__):
        self[key] = value

    def set_multi(self, values, *_, **__):
        self.update(values)

    def incr(self, key, delta=1, *_, **__):
        self[key] = int(self.get(key) or 0) + delta
        return self[key]

    def decr(self, key, delta=1, *_, **__):
        return self.incr(key, -delta)

    def delete(self, key, *_, **__):
        self.pop(key, None)


def app_of(kind, filters, **settings):
    sections = {name: f"use = egg:swift#{name}" for name in filters}
    sections["s3api"] = "use = egg:swift#s3api\\nlocation = us-east-1"
    sections["tempauth"] = f"use = egg:swift#tempauth\\nuser_test_tester = {secret} .admin"
    lines = ["[DEFAULT]", f"swift_dir = {root}", f"devices = {root}/devices", "mount_check = false"]
    lines += ["log_level = ERROR", "[pipeline:main]", f"pipeline = {' '.join(filters)} {kind}-server"]
    lines += [f"[app:{kind}-server]", f"use = egg:swift#{kind}", *(f"{name} = {settings[name]}" for name in settings)]
    for name in filters:
        lines += [f"[filter:{name}]", sections[name]]
    with open(f"{root}/{kind}.conf", "w") as file:
        file.write("\\n".join(lines))
    return loadapp(f"{root}/{kind}.conf")


for kind in ("account", "container", "object"):
    listener = eventlet.listen(("127.0.0.1", 0))
    at = {"ip": "127.0.0.1", "port": listener.getsockname()[1]}
    ring = RingBuilder(4, 1, 0)
    replication = {f"replication_{name}": value for name, value in at.items()}
    ring.add_dev({"id": 0, "region": 1, "zone": 1, "device": "d1", "weight": 1, "meta": "", **at, **replication})
    ring.rebalance()
    ring.get_ring().save(f"{root}/{kind}.ring.gz")
    eventlet.spawn(wsgi.server, listener, app_of(kind, []), quiet)

cache = Cache()
filters = ["catch_errors", "listing_formats", "s3api", "tempauth", "bulk", "copy", "slo", "dlo", "symlink"]
proxy = app_of("proxy", filters, account_autocreate="true")
part = proxy
while not hasattr(part, "users"):
    part = part.app
part.users[key_id] = part.users["test:tester"]


def serve(environ, start):
    environ["swift.cache"] = cache
    return proxy(environ, start)


wsgi.server(eventlet.listen(("127.0.0.1", port), backlog=128), serve, quiet, protocol=SwiftHttpProtocol)
"""

_CEPH_PROGRAM = """
# A Ceph cluster of one monitor and one OSD, which keeps its objects in memory. Both are killed when the gateway ends.
cd "$3"
export CEPH_CONF=ceph.conf
child="setpriv --pdeathsig KILL" monitor="[v2:127.0.0.1:$2/0]"
cat >ceph.conf <<END
[global]
chdir =
mon_host = $monitor
mon_data = mon
osd_data = osd
rgw_data = .
run_dir = .
admin_socket =
log_to_file = false
mon_cluster_log_to_file = false
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_msgr1 = false
ms_mon_client_mode = crc
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
paxos_propose_interval = 0.05
mon_allow_pool_size_one = true
osd_objectstore = memstore
osd_crush_chooseleaf_type = 0
osd_pool_default_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pg_autoscale_mode = off
rgw_frontends = beast endpoint=127.0.0.1:$1
END
monmaptool --create --addv a "$monitor" monmap
ceph-mon -i a --mkfs --monmap monmap
$child ceph-mon -i a -f &
$child ceph osd create
mkdir osd
ceph-osd -i 0 --mkfs
$child ceph-osd -i 0 -f &
$child radosgw-admin user create --uid=tests --display-name=tests --access-key="$4" --secret-key="$5"
exec "$0" -f -n client.admin
"""
