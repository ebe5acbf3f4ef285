"""Azurite, Microsoft's emulator of Azure Blob Storage, in another process: it checks signatures, and has batches.

`azurite` lasts for the session, and skips if the program `azurite-blob` is not on the path (`npm install -g azurite`).
"""

from __future__ import annotations

import email.utils
import hmac
import itertools
import os
import shutil
import socket
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Iterator

import pytest

from tests.support.fake_azure import ACCOUNT, ACCOUNT_KEY
from tests.support.server_process import ServerProcess

_PROGRAM = "azurite-blob"
_VERSION = "2023-11-03"
_numbers = itertools.count(1)


class Azurite(ServerProcess):
    """Azurite with its blobs in memory."""

    def command(self) -> list[str]:
        program = shutil.which(_PROGRAM)
        assert program is not None, f"{_PROGRAM} is not installed"
        memory = ["--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck", "--silent"]
        return [program, "--blobHost", "127.0.0.1", "--blobPort", str(self.port), *memory]

    def answers(self) -> bool:
        try:
            socket.create_connection(self.address, 1.0).close()
        except OSError:
            return False
        return True

    def entry(self, **changes: object) -> dict[str, object]:
        """Return the YAML entry of an azure tier in a new container."""
        name = f"container-{os.getpid()}-{next(_numbers)}"
        self._make_container(name)
        endpoint = f"http://127.0.0.1:{self.port}/{ACCOUNT}"
        place = {"type": "azure", "account": ACCOUNT, "container": name, "endpoint": endpoint}
        return {**place, "account_key": ACCOUNT_KEY, **changes}

    def _make_container(self, name: str) -> None:
        """Make a container by a request that is signed with the account's key."""
        date = email.utils.formatdate(usegmt=True)
        headers = f"x-ms-date:{date}\nx-ms-version:{_VERSION}"
        path = f"/{ACCOUNT}/{name}"
        text = "\n".join(["PUT", *[""] * 11, headers, f"/{ACCOUNT}{path}", "restype:container"])
        digest = hmac.digest(b64decode(ACCOUNT_KEY), text.encode(), "sha256")
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}?restype=container", method="PUT", data=b""
        )
        request.add_header("x-ms-date", date)
        request.add_header("x-ms-version", _VERSION)
        request.add_header("Content-Type", "")
        request.add_header("Authorization", f"SharedKey {ACCOUNT}:{b64encode(digest).decode()}")
        with urllib.request.urlopen(request, timeout=60.0):
            pass


@pytest.fixture(scope="session")
def azurite() -> Iterator[Azurite]:
    if shutil.which(_PROGRAM) is None:
        pytest.skip(f"not installed: {_PROGRAM} (npm install -g azurite)")
    with Azurite() as server:
        yield server
