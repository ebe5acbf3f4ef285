"""`/limits`: the shares of tenants, read and changed over HTTP.

The HTTP server's threads call it. What must stay true: anyone who may read the status may read them; only a caller that
`/prefetch` hears changes one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from email.message import Message as Headers
from http import HTTPStatus
from typing import Any, Final

from tiered_kv.config.limits import check_limit
from tiered_kv.config.settings import PRIMARY_NAME
from tiered_kv.errors import ConfigError
from tiered_kv.hints import TENANT_PATTERN
from tiered_kv.stack.exporters.prefetch import Answer, Choose
from tiered_kv.stack.exporters.status import Observed
from tiered_kv.stack.limits import change_limit, limits_report

PATH: Final = "/limits"
_FIELDS: Final = {"namespace", "tier", "tenant", "limit"}


def limits_page(stack: Observed, query: Mapping[str, Sequence[str]]) -> dict[str, Any]:  # Any: JSON
    """Answer `GET /limits`.

    Raises:
        ConfigError: No tier has shares, or the query is invalid.
    """
    if unknown := query.keys() - {"namespace"}:
        raise ConfigError(f"expected no query but 'namespace', found {sorted(unknown)}")
    return limits_report(stack)


def answer_change(choose: Choose, headers: Headers, body: bytes) -> Answer:
    """Answer `POST /limits`, of a caller that is heard.

    Raises:
        ConfigError: It cannot be understood, or the change cannot be made.
    """
    if headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
        return HTTPStatus.UNSUPPORTED_MEDIA_TYPE, {"error": "expected Content-Type: application/json"}
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict) or not asked.keys() <= _FIELDS or not {"tenant", "limit"} <= asked.keys():
        raise ConfigError(
            f"expected a JSON object with 'tenant' and 'limit', and no other fields than {sorted(_FIELDS)}"
        )
    tenant, limit, namespace = asked["tenant"], asked["limit"], asked.get("namespace", "")
    tier = asked.get("tier", PRIMARY_NAME)
    if not isinstance(tenant, str) or not re.fullmatch(TENANT_PATTERN, tenant):
        raise ConfigError("tenant: expected a name of up to 64 letters, digits, '.', '_' and '-'")
    if not isinstance(tier, str):
        raise ConfigError("tier: expected the name of a tier")
    if not isinstance(namespace, str):
        raise ConfigError("namespace: expected the first characters of a digest")
    if limit is not None:
        try:
            limit = check_limit(limit)
        except ValueError as error:
            raise ConfigError(f"limit: {error}, or null to take a change back") from error
    stack = choose(namespace)
    is_kept = change_limit(stack, tier, tenant, limit)
    return HTTPStatus.OK, {"is_kept": is_kept, **limits_report(stack)}
