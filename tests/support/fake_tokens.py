"""A server of Azure's managed identities on loopback. It gives tokens to whoever asks."""

from __future__ import annotations

import json
import socket
import threading
import time

from tests.support.fake_s3 import answer
from tests.support.loopback import LoopbackServer

TOKEN = "a-secret-token"


class FakeTokens(LoopbackServer):
    """Gives tokens that are valid for `valid_s`, and may fall silent."""

    def __init__(self, valid_s: int = 86_400) -> None:
        self.is_silent = False
        self._valid_s = valid_s
        self._over = threading.Event()
        super().__init__()

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a process finds this server."""
        return {"IDENTITY_ENDPOINT": f"http://{self.address}/token", "IDENTITY_HEADER": "h"}

    def serve(self, sock: socket.socket) -> None:
        with sock.makefile("rb") as reading:
            while reading.readline():
                while reading.readline().strip():
                    pass
                if self.is_silent:
                    self._over.wait()
                    return
                ends = {"expires_in": str(self._valid_s), "expires_on": str(int(time.time()) + self._valid_s)}
                text = json.dumps({"access_token": TOKEN, "resource": "r", "token_type": "Bearer", **ends})
                sock.sendall(answer(200, text.encode(), content_type="application/json"))

    def close(self) -> None:
        self._over.set()
        super().close()
