"""The status of a stack, as JSON."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from tiered_kv.config.settings import TierSettings
from tiered_kv.exporters.explain import Observed
from tiered_kv.exporters.series import is_finite, numbers_of, safe_label
from tiered_kv.metrics.histogram import quantile
from tiered_kv.stack_config import PRIMARY_TIER_NAME

_BREAKER = {0: "closed", 1: "half_open", 2: "open"}


def status(stack: Observed) -> dict[str, Any]:  # Any: as JSON has it
    """Return the status of a stack; `docs/how-to/metrics.md` describes the fields. Any thread may call.

    It has no key, path, address or setting, except for the names of tiers and the namespace's digest.

    Raises:
        ShutdownError: The stack is closed.
    """
    config, counters = stack.config, stack.counters()
    disabled, secrets = stack.manager.disabled_tiers(), config.secret_texts()
    tiers = [_primary(counters[PRIMARY_TIER_NAME])]
    tiers += [_secondary(tier, counters[tier.name], tier.name in disabled, secrets) for tier in config.secondary]
    return {
        "version": version("tiered-kv"),
        "namespace": config.identity.digest.hex(),
        "pid": os.getpid(),
        "uptime_seconds": time.monotonic() - stack.opened_s,
        "time": time.time(),
        "tiers": tiers,
        "notices": stack.manager.notices.snapshot(),
    }


def _primary(counted: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": PRIMARY_TIER_NAME,
        "type": PRIMARY_TIER_NAME,
        "breaker": "",
        "is_disabled": False,
        "used_bytes": counted["used_bytes"],
        "capacity_bytes": counted["capacity_bytes"],
        **_quantiles({"step": counted["step_seconds"]}),
        "counters": counted,
    }


def _secondary(
    settings: TierSettings, counted: Mapping[str, Any], is_disabled: bool, secrets: set[str]
) -> dict[str, Any]:
    own = _plain(counted["tier"], secrets)
    return {
        "name": settings.name,
        "type": safe_label(settings.type, secrets),
        "breaker": _BREAKER[counted["breaker_state"]],
        "is_disabled": is_disabled,
        "used_bytes": _whole(own.get("used_bytes")),
        "capacity_bytes": _whole(own.get("capacity_bytes")),
        "budgets": {
            direction: {
                "used_bytes": counted[f"{direction}_budget_used_bytes"],
                "limit_bytes": counted[f"{direction}_budget_bytes"],
            }
            for direction in ("store", "load")
        },
        **_quantiles({**counted["job_seconds"], "lookup": counted["lookup_seconds"]}),
        "counters": {**counted, "tier": own},
    }


def _quantiles(histograms: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    return {
        f"p{percent}_seconds": {name: quantile(histogram, percent / 100) for name, histogram in histograms.items()}
        for percent in (50, 99)
    }


def _plain(values: Mapping[str, Any], secrets: set[str]) -> dict[str, Any]:
    """Return a tier's own counters, with plain words and numbers only."""
    shown: dict[str, Any] = {}
    for name, labels, number in numbers_of(values):
        *above, last = (safe_label(text, secrets) for text in (name, *labels))
        inner = shown
        for label in above:
            found = inner.setdefault(label, {})
            inner = found if isinstance(found, dict) else {}
        inner[last] = number if is_finite(number) else None
    return shown


def _whole(number: object) -> int | None:
    return int(number) if isinstance(number, (int, float)) else None
