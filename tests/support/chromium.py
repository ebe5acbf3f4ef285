"""A headless Chromium, driven by its protocol over two pipes: what a page shows, requests and logs."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

Answer = dict[str, Any]  # Any: JSON

_WAIT_S = 120.0
_COMPLAINTS = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Network.loadingFailed")
_HEIGHT = 900
_FREE_FD = 10
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # it is root's, in a container
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Chromium:
    """A browser with its profile and all files in `directory`; a context manager. One thread."""

    def __init__(self, directory: Path) -> None:
        program = find_chromium()
        assert program is not None, "find_chromium says whether there is one"
        from_us, self._to = os.pipe()
        self._from, to_us = os.pipe()
        # Chromium reads from descriptor 3 and writes to descriptor 4; copies beyond them leave both free.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, _FREE_FD) for end in (from_us, to_us)]
        command = ["bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}', "bash", program, *_FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={directory / 'profile'}", "about:blank"],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(directory), "HOME": str(directory)},
        )
        for end in (*ends, from_us, to_us):
            os.close(end)
        self._numbers = itertools.count(1)
        self._unread = b""
        self.events: list[Answer] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(_WAIT_S)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._to)
            os.close(self._from)

    def open(self, file: Path, *, width: int = 1280, dark: bool = False) -> Page:
        """Open a file in a new page and wait until it is loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, session, file, width, dark)

    def call(self, method: str, session: str | None = None, **params: object) -> Answer:
        """Return the answer to a command; events that arrive meanwhile are kept."""
        number = next(self._numbers)
        message: Answer = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.next_message()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: Answer = answer["result"]
                return result
            self.events.append(answer)

    def next_message(self) -> Answer:
        deadline = time.monotonic() + _WAIT_S
        while b"\0" not in self._unread:
            readable, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, "Chromium says nothing"
            read = os.read(self._from, 1 << 20)
            assert read, "Chromium has ended"
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\0")
        message: Answer = json.loads(line)
        return message


class Page:
    """A page that is open in a `Chromium`."""

    def __init__(self, browser: Chromium, session: str, file: Path, width: int, dark: bool) -> None:
        self._browser = browser
        self._session = session
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._call(f"{domain}.enable")
        self.emulate(dark=dark)
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=_HEIGHT, deviceScaleFactor=1, mobile=False)
        self._call("Page.navigate", url=file.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events()):
            browser.events.append(browser.next_message())

    @property
    def fetched(self) -> list[str]:
        """The addresses that the page requested, including its address."""
        sent = [event["params"] for event in self._events() if event["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent]

    @property
    def complaints(self) -> list[Answer]:
        """Console messages, scripts that failed, and failed requests."""
        return [event for event in self._events() if event["method"] in _COMPLAINTS]

    def emulate(self, *, media: str = "", dark: bool) -> None:
        """Set the preferred colour scheme, and the medium: "print" for paper."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def value(self, expression: str) -> Any:  # Any: JSON
        """Return the value of a JavaScript expression in this page."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"]["value"]

    def pdf(self) -> bytes:
        """Return the page as printed on A4."""
        printed = self._call("Page.printToPDF", printBackground=False, paperWidth=8.27, paperHeight=11.69)
        return base64.b64decode(printed["data"])

    def _call(self, method: str, **params: object) -> Answer:
        return self._browser.call(method, self._session, **params)

    def _events(self) -> list[Answer]:
        return [event for event in self._browser.events if event.get("sessionId") == self._session]
