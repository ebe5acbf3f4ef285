"""The limits of tenants while a stack runs: changes of them, and the file that keeps these over a restart.

The HTTP server's threads change and read them; a host's server reads the file when it opens a stack. A tier takes a
change with its next store. What must stay true: a changed limit goes before that of the stack's file until it
is taken back, and the file is whole or as it was before.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, Field, ValidationError

from tiered_kv.config.limits import DEFAULT_TENANT, LIMITS_MAX, Limits, TenantLimits, limit_bytes
from tiered_kv.config.settings import PRIMARY_NAME
from tiered_kv.config.units import format_bytes
from tiered_kv.errors import ConfigError, FormatError
from tiered_kv.metrics.own import is_finite
from tiered_kv.metrics.series import TierSeries
from tiered_kv.shares import TENANTS_MAX
from tiered_kv.stack.exporters.status import Observed
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.toolkit.small_files import read_file, replace_file

VERSION: Final = 1
FILE_BYTES_MAX: Final = 1 << 20
NAMES_MAX: Final = LIMITS_MAX + TENANTS_MAX
"""Limit of the tenants that a tier knows: each that has had a request stays, also without a limit of its own."""
_DIGEST_CHARACTERS: Final = 16

_log = logging.getLogger(__name__)
_changes = threading.Lock()
"""Held while limits change: never by a thread that evicts."""


def limits_path(socket_path: Path, digest: str) -> Path:
    """Return where a server keeps the changed limits of a namespace: in the service's STATE_DIRECTORY if it has one,
    else beside its socket. `digest` is in hexadecimal.
    """
    folder = os.environ.get("STATE_DIRECTORY", "").split(":")[0] or socket_path.parent
    return Path(folder) / f"{socket_path.name}.limits-{digest[:_DIGEST_CHARACTERS]}"


def restore_limits(manager: TieringOffloadingManager, path: Path) -> None:
    """Set the changed limits of an earlier process. A file that cannot be used changes none."""
    if not (sharing := manager.tenant_limits()) or not os.path.lexists(path):
        return
    try:
        kept = _read(path)
    except (OSError, FormatError) as error:
        _log.warning("the changed limits of an earlier process are not used: %s", error)
        return
    for tier, limits in sharing.items():
        limits.change(kept.limits if tier == PRIMARY_NAME else kept.tiers.get(tier, {}))


class _Kept(BaseModel):
    """The changed limits in a file."""

    version: int = VERSION
    limits: Limits
    """Of the primary tier."""
    tiers: dict[str, Limits] = Field(default_factory=dict)
    """Of each other tier that has some."""


def _read(path: Path) -> _Kept:
    """Return what a file of changes holds.

    Raises:
        FormatError: It is none. `_OtherVersionError`: another release has written it.
        OSError: It cannot be read.
    """
    data = read_file(os.fspath(path), FILE_BYTES_MAX)
    if data is None:
        raise FormatError(f"{path}: expected a regular file of at most {format_bytes(FILE_BYTES_MAX)}")
    try:
        kept = json.loads(data)
    except (ValueError, RecursionError):
        kept = None
    version = kept.get("version") if isinstance(kept, dict) else None
    if type(version) is not int:
        raise FormatError(f"{path}: it is damaged, or holds no changed limits")
    if version != VERSION:
        raise _OtherVersionError(f"{path}: it has format version {version}, and this release reads {VERSION}")
    try:
        return _Kept.model_validate({"limits": None, **kept})
    except ValidationError as error:
        (first, *_) = error.errors()
        where = ".".join(map(str, first["loc"]))
        raise FormatError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}") from error


class _OtherVersionError(FormatError):
    """Another release has written the file."""


def _keep(path: Path, changed: Mapping[str, Mapping[str, str]]) -> None:
    """Write all changed limits, by tier, in place of an older file. Changes of tiers without shares now stay there.

    Raises:
        ConfigError: The file cannot be written, or the older one is of another release.
    """
    reason = "the change cannot be kept, and was not made"
    older: Mapping[str, Mapping[str, str]] = {}
    try:
        kept = _read(path)
        older = {PRIMARY_NAME: kept.limits, **kept.tiers}
    except _OtherVersionError as error:
        raise ConfigError(f"{reason}: {error}; move the file away, and its changes are forgotten") from error
    except (OSError, FormatError):  # there is none, or nothing in it is lost
        pass
    tiers = {tier: dict(limits) for tier, limits in {**older, **changed}.items() if limits}
    kept = _Kept(limits=tiers.pop(PRIMARY_NAME, {}), tiers=tiers)
    try:
        replace_file(os.fspath(path), kept.model_dump_json(indent=1).encode() + b"\n", flush=True)
    except OSError as error:
        raise ConfigError(f"{reason}: {error.strerror or type(error).__name__}", location=os.fspath(path)) from error


def change_limit(stack: Observed, tier: str, tenant: str, limit: str | None) -> bool:
    """Set the share of a tenant in a tier, or with None take the change back; return whether it is kept over a restart.

    Raises:
        ConfigError: The tier has no shares, there would be too many, or the change cannot be kept.
    """
    sharing = _sharing(stack)
    if tier not in sharing:
        raise ConfigError(f"the tier '{tier}' has no shares; those with shares: {', '.join(sharing)}", location="tier")
    own, path = sharing[tier], stack.limits_path
    with _changes:
        changed = {name: each for name, each in own.changed.items() if name != tenant}
        if limit is not None:
            changed[tenant] = limit
        if len({**own.given, **changed}) > LIMITS_MAX:
            raise ConfigError(f"expected limits of at most {LIMITS_MAX} tenants")
        known = _tier_report(own, stack.snapshot().tiers[tier])["tenants"]
        if limit is not None and len({*known, tenant}) > NAMES_MAX:
            raise ConfigError(
                f"{NAMES_MAX} tenants have had a limit or a request since this process began, and no other one can get "
                "a limit: begin it anew"
            )
        if path is not None:
            _keep(path, {**{name: limits.changed for name, limits in sharing.items()}, tier: changed})
        own.change(changed)
    return path is not None


def limits_report(stack: Observed) -> dict[str, Any]:  # Any: JSON
    """Return each tenant's share in each tier that has shares, and what it holds; see `docs/how-to/fair-shares.md`.

    Raises:
        ConfigError: No tier of the stack has shares.
    """
    sharing, snapshot = _sharing(stack), stack.snapshot()
    tiers = {tier: _tier_report(limits, snapshot.tiers[tier]) for tier, limits in sharing.items()}
    primary, stages = tiers.pop(PRIMARY_NAME, {}), stack.manager.removed_tiers()
    for tier, report in tiers.items():
        report["removal"] = stages.get(tier, "")
    return {**primary, "tiers": tiers} if tiers else primary


def _tier_report(limits: TenantLimits, counted: TierSeries) -> dict[str, Any]:  # Any: JSON
    """Return a tier's shares. A tier that is not open now has a capacity of 0: its `removal` says why."""
    latest, changed = limits.latest, limits.changed
    capacity_bytes = _numbers(counted, "capacity_bytes").get("", 0)
    used, evicted = _numbers(counted, "tenant_used_bytes"), _numbers(counted, "tenant_evicted_blocks_total")
    shown = {name: latest.get(name, latest[DEFAULT_TENANT]) for name in dict.fromkeys([*latest, *used])}
    return {
        "capacity_bytes": capacity_bytes,
        "tenants": {
            name: {
                "limit": limit,
                "is_changed": name in changed,
                "share_bytes": limit_bytes(limit, capacity_bytes),
                "used_bytes": used.get(name, 0),
                "evicted_blocks": evicted.get(name, 0),
            }
            for name, limit in shown.items()
        },
    }


def _numbers(counted: TierSeries, name: str) -> dict[str, int]:
    """Return a tier's numbers of one metric by their label, or by "" without labels.

    The manager counts those of the primary tier; another tier counts its own, and a third-party one may do it wrong.
    """
    if counted.own is None:
        found = dict(counted.families[name].values)
    else:
        found = {each.labels: each.given for each in counted.own if each.name == name}
    return {"".join(labels): int(value) for labels, value in found.items() if is_finite(value)}


def _sharing(stack: Observed) -> dict[str, TenantLimits]:
    """Return the limits of each tier that has shares."""
    if not (sharing := stack.manager.tenant_limits()):
        raise ConfigError(
            "the stack has no shares: add 'limits: {}' to its file, for the primary tier, or to the entry of a tier "
            "that gives shares, and open it anew",
            location="limits",
        )
    return sharing
