"""Requests over HTTP to a process that has a stack open. It may run another version, or be no stack."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from tiered_kv.config.reading import fill_variables, from_source
from tiered_kv.config.validation import validate
from tiered_kv.errors import ConfigError, TierUnavailableError
from tiered_kv.stack_config import MetricsSettings

ANSWER_BYTES_MAX: Final = 8 << 20
TIMEOUT_S: Final = 5.0
_REASON_BYTES_MAX: Final = 1000
DEFAULT_ADDRESS: Final = "127.0.0.1:9464"
_LINE: Final = f'metrics: {{listen: "{DEFAULT_ADDRESS}"}}'
_HOST_AND_PORT = re.compile(r"([A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
_PATH = re.compile("[!-~]*")


@dataclass(frozen=True, slots=True)
class StatusAddress:
    """The address of a stack's process; `path` is the prefix of all pages."""

    host: str
    port: int
    is_tls: bool = False
    path: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.path}"


def is_address(text: str) -> bool:
    """Return whether a text is a URL or HOST:PORT, and not the path of a file."""
    return "://" in text or _HOST_AND_PORT.fullmatch(text) is not None


def address_of(text: str) -> StatusAddress:
    """Return the address in `text`: a URL, HOST:PORT, or the path of a stack's file, for its `metrics.listen`.

    Only `metrics` is read of a stack's file. So the variables of its secrets need not be set here.

    Raises:
        ConfigError: `text` is none of these, or the file has no `metrics.listen`.
    """
    if is_address(text):
        return _address_of_url(text if "://" in text else f"http://{text}")
    return from_source(text, _address_of_stack)


def fetch(address: StatusAddress, page: str, timeout_s: float = TIMEOUT_S) -> bytes:
    """Return the body of a page, such as "/status". The call waits up to `timeout_s` seconds for each part of it.

    Raises:
        ConfigError: The server refuses the query in `page`.
        TierUnavailableError: The server does not answer, or has no such page.
    """
    protocol = http.client.HTTPSConnection if address.is_tls else http.client.HTTPConnection
    try:
        with contextlib.closing(protocol(address.host, address.port, timeout=timeout_s)) as connection:
            connection.request("GET", f"{address.path}{page}", headers={"Accept": "application/json"})
            with connection.getresponse() as response:
                body = response.read(ANSWER_BYTES_MAX + 1)
    except TimeoutError:
        raise TierUnavailableError(f"no answer within {timeout_s:g} s") from None
    except ssl.SSLError as error:
        raise TierUnavailableError(f"TLS failed: {error.reason or 'unknown reason'}") from error
    except (http.client.HTTPException, ValueError) as error:
        raise TierUnavailableError(f"the answer is not HTTP, or was cut off ({type(error).__name__})") from error
    except OSError as error:
        raise TierUnavailableError((error.strerror or type(error).__name__).lower()) from error
    if len(body) > ANSWER_BYTES_MAX:
        raise TierUnavailableError(f"the answer has more than {ANSWER_BYTES_MAX >> 20} MiB")
    if response.status == http.HTTPStatus.BAD_REQUEST:
        why = body[:_REASON_BYTES_MAX].decode(errors="replace").strip()
        raise ConfigError(f"{address} refuses: {why if why.isprintable() else 'no reason that can be shown'}")
    if response.status != http.HTTPStatus.OK:
        raise TierUnavailableError(f"it answers with HTTP status {response.status}, not with {page}")
    return body


def _address_of_url(url: str) -> StatusAddress:
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError:
        port, host = None, None
    if not host or parts.scheme not in ("http", "https") or not _PATH.fullmatch(parts.path):
        raise ConfigError(f"expected a URL such as http://{DEFAULT_ADDRESS}, or the path of a stack's file")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            f"expected a URL without user, password, query and fragment, such as http://{DEFAULT_ADDRESS}"
        )
    is_tls = parts.scheme == "https"
    if port is None:
        port = 443 if is_tls else 80
    _check_port(port)
    path = parts.path.rstrip("/").removesuffix("/status").removesuffix("/metrics")
    return StatusAddress(host, port, is_tls, path)


def _address_of_stack(raw: Mapping[str, object]) -> StatusAddress:
    if raw.get("metrics") is None:
        raise ConfigError(
            f"the stack serves no status; add this line to the file, and open the stack anew: {_LINE}",
            location="metrics.listen",
        )
    filled = fill_variables({"metrics": raw["metrics"]}, os.environ)
    host, port = validate(MetricsSettings, filled["metrics"], ("metrics",)).address
    _check_port(port)
    return StatusAddress(host, port)


def _check_port(port: int) -> None:
    if port == 0:
        raise ConfigError("no server listens at port 0: give the URL with the port that the process has taken")
