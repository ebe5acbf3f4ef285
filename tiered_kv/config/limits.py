"""The share of a tenant, as `limits` of a stack's file, a command and a file of changed limits give it.

Settings, tiers and the command read it, on any thread. A limit stays the text that was given, so that it is shown as
it was written. `TenantLimits` are the limits of one open tier, which may change while the tier is open.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, WithJsonSchema

from tiered_kv.config.units import parse_bytes
from tiered_kv.hints import DEFAULT_TENANT, TENANT_PATTERN

__all__ = ["DEFAULT_TENANT", "WHOLE", "Limit", "Limits", "TenantLimits", "check_limit", "given_limits", "limit_bytes"]

WHOLE: Final = "100%"
"""The share of a tenant without a limit."""
LIMITS_MAX: Final = 1000
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%")
_ACCEPTED = "a size such as 200GiB, or a percentage of the capacity such as 25%"


def check_limit(limit: object) -> str:
    """Return a limit as a text; raise ValueError if it is neither a size nor a percentage up to 100%."""
    text = str(limit).strip() if isinstance(limit, (str, int)) and not isinstance(limit, bool) else ""
    try:
        limit_bytes(text, 0)
    except ValueError:
        raise ValueError(f"expected {_ACCEPTED}") from None
    return text


def limit_bytes(limit: str, capacity_bytes: int) -> int:
    """Return the bytes of a limit in a tier with this capacity: at most all of it."""
    if (percent := _PERCENT.fullmatch(limit)) is None:
        return min(parse_bytes(limit), capacity_bytes)
    part = Decimal(percent[1])
    if part > 100:
        raise ValueError("more than 100%")
    return int(capacity_bytes * part / 100)


Limit = Annotated[
    str,
    BeforeValidator(check_limit),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*([kKMGTP]?i?B|%)?\s*$|\$\{"},
            ],
            "description": _ACCEPTED,
        }
    ),
]
"""A share of a tier: in YAML 200GiB, 25% or a number of bytes."""


def _check_names(limits: Mapping[str, str]) -> Mapping[str, str]:
    for name in limits:
        if not re.fullmatch(TENANT_PATTERN, name):
            raise ValueError(f"expected names of tenants, of letters, digits, '.', '_' and '-'; found {name[:64]!r}")
    return limits


Limits = Annotated[dict[str, Limit], Field(max_length=LIMITS_MAX), AfterValidator(_check_names)]
"""The shares of tenants by their names."""


class TenantLimits:
    """The limits of one tier's tenants, with the changes while it is open. Any thread may call.

    `latest` is another mapping after each change: so who keeps one sees that there was a change.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self.given = dict(given)
        """The limits of the stack's file, by tenant."""
        self.changed: Mapping[str, str] = {}
        """Those that were changed since; they go before `given`."""
        self.latest: Mapping[str, str] = {DEFAULT_TENANT: WHOLE, **self.given}

    def change(self, changed: Mapping[str, str]) -> None:
        """Set all changed limits. They count from the next eviction on. One thread at a time calls."""
        self.changed = changed
        self.latest = {DEFAULT_TENANT: WHOLE, **self.given, **changed}

    @classmethod
    def of_entry(cls, settings: BaseModel) -> TenantLimits | None:
        """Return new limits of a tier's entry; None if it has none."""
        given = given_limits(settings)
        return None if given is None else cls(given)


def given_limits(settings: BaseModel) -> Mapping[str, str] | None:
    """Return the limits in a tier's entry; None if it has none, or its model has no field `limits`."""
    return getattr(settings, "limits", None) if "limits" in type(settings).model_fields else None
