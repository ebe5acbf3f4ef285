"""`/drain` and `/attach`: an operator takes a tier of a running stack out, and puts it back.

The HTTP server's threads call it. It leaves a message for the manager (`tiering/removal.py`), and waits for nothing.
What must stay true: only callers that `/prefetch` hears are heard.
"""

from __future__ import annotations

import json
from email.message import Message as Headers
from http import HTTPStatus
from typing import Final, cast

from tiered_kv.errors import ConfigError
from tiered_kv.stack.exporters.prefetch import Answer, Choose
from tiered_kv.tiering.removal import Verb

PATHS: Final = ("/drain", "/attach")
_FIELDS: Final = frozenset({"tier", "namespace"})


def answer_removal(choose: Choose, method: str, path: str, headers: Headers, body: bytes) -> Answer:
    """Answer a call of a caller that is heard; `/status` shows what becomes of it.

    Raises:
        ConfigError: The call is none, or there is no such tier.
    """
    if method != "POST":
        return HTTPStatus.METHOD_NOT_ALLOWED, {"error": f"there is: POST {path}"}
    if headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
        return HTTPStatus.UNSUPPORTED_MEDIA_TYPE, {"error": "expected Content-Type: application/json"}
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        asked = None
    if (
        not isinstance(asked, dict)
        or not asked.keys() <= _FIELDS
        or not all(isinstance(v, str) for v in asked.values())
    ):
        raise ConfigError("expected a JSON object with 'tier', and 'namespace' if several are open")
    stack = choose(asked.get("namespace", ""))
    stack.manager.removals.ask(cast(Verb, path.strip("/")), asked.get("tier", ""))
    return HTTPStatus.OK, {"tier": asked.get("tier", "")}
