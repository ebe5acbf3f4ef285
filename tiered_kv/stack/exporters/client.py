"""The client of a stack's HTTP server, for the command and for other stacks. No answer is larger than a limit.

Any thread but a scheduler's may call; each call waits for its answer. Nothing here keeps a state.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import ssl
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from tiered_kv.config.secrets import problem_of_token
from tiered_kv.errors import ConfigError, TierUnavailableError

ANSWER_BYTES_MAX: Final = 8 << 20
TIMEOUT_S: Final = 5.0
DEFAULT_ADDRESS: Final = "127.0.0.1:9464"
_REASON_BYTES_MAX: Final = 1000
_REFUSALS: Final = (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN)
_PATH = re.compile("[!-~]*")
_HOST_AND_PORT = re.compile(r"([A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")


def is_address(text: str) -> bool:
    """Return whether a text is a URL or HOST:PORT, and not the path of a file."""
    return "://" in text or _HOST_AND_PORT.fullmatch(text) is not None


def url_of_address(text: str) -> str:
    """Return the URL without a page, for a URL or HOST:PORT.

    Raises:
        ConfigError: `text` is neither.
    """
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        is_plain = parts.port != 0 and "@" not in parts.netloc and not (parts.query or parts.fragment)
    except ValueError:
        is_plain = False
    if not (is_plain and parts.hostname and parts.scheme in ("http", "https") and _PATH.fullmatch(parts.path)):
        raise ConfigError(
            f"expected a URL such as http://{DEFAULT_ADDRESS}, without user, password, query and fragment, or the path "
            "of a stack's file"
        )
    path = parts.path.rstrip("/").removesuffix("/status").removesuffix("/metrics")
    return f"{parts.scheme}://{parts.netloc}{path}"


def bearer(token: str, *, location: str = "") -> dict[str, str]:
    """Return the header that sends a token; `location` names it in the error.

    Raises:
        ConfigError: No header can hold it.
    """
    if problem := problem_of_token(token):
        raise ConfigError(f"the token {problem}", location=location)
    return {"Authorization": f"Bearer {token}"}


def fetch(
    url: str,
    page: str,
    timeout_s: float = TIMEOUT_S,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> bytes:
    """Return the body of a page, such as "/status". The call waits up to `timeout_s` seconds for each part of it.

    With a `body`, which is JSON, it is sent to the page.

    Raises:
        ConfigError: The server refuses the query in `page`, the body, or the caller.
        TierUnavailableError: The server does not answer, or has no such page.
    """
    parts = urlsplit(url)
    protocol = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        with contextlib.closing(protocol(parts.netloc, timeout=timeout_s)) as connection:
            kind = {} if body is None else {"Content-Type": "application/json"}
            sent = {"Accept": "application/json", **kind, **(headers or {})}
            connection.request("GET" if body is None else "POST", f"{parts.path}{page}", body, sent)
            with connection.getresponse() as response:
                answer = response.read(ANSWER_BYTES_MAX + 1)
    except TimeoutError:
        raise TierUnavailableError(f"no answer within {timeout_s:g} s") from None
    except ssl.SSLError as error:
        raise TierUnavailableError(f"TLS failed: {error.reason or 'unknown reason'}") from error
    except (http.client.HTTPException, ValueError) as error:
        raise TierUnavailableError(f"the answer is not HTTP, or was cut off ({type(error).__name__})") from error
    except OSError as error:
        raise TierUnavailableError((error.strerror or type(error).__name__).lower()) from error
    if len(answer) > ANSWER_BYTES_MAX:
        raise TierUnavailableError(f"the answer has more than {ANSWER_BYTES_MAX >> 20} MiB")
    if response.status == http.HTTPStatus.BAD_REQUEST or (body is not None and response.status in _REFUSALS):
        why = _reason(answer[:_REASON_BYTES_MAX])
        raise ConfigError(f"{url} refuses: {why if why.isprintable() else 'no reason that can be shown'}")
    if response.status != http.HTTPStatus.OK:
        raise TierUnavailableError(f"it answers with HTTP status {response.status}, not with {page}")
    return answer


def _reason(answer: bytes) -> str:
    """Return why a call was refused: a text, or the `error` of a JSON object."""
    with contextlib.suppress(ValueError, RecursionError):
        told = json.loads(answer)
        if isinstance(told, dict) and isinstance(told.get("error"), str):
            return str(told["error"])
    return answer.decode(errors="replace").strip()
