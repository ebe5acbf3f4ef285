"""The limits of tenants while a stack runs: changes of them, and the file that keeps these over a restart.

The HTTP server's threads change and read them; a host's server reads the file when it opens a stack. The primary tier
takes a change with its next store. What must stay true: a changed limit goes before that of the stack's file until it
is taken back, and the file is whole or as it was before.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from tiered_kv.config.limits import DEFAULT_TENANT, LIMITS_MAX, Limits
from tiered_kv.config.units import format_bytes
from tiered_kv.cpu.policies.shares import TENANTS_MAX, FairShares
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.cpu.shared_rows import SharedRows
from tiered_kv.errors import ConfigError, FormatError
from tiered_kv.toolkit.small_files import read_file, replace_file

VERSION: Final = 1
FILE_BYTES_MAX: Final = 1 << 20
NAMES_MAX: Final = LIMITS_MAX + TENANTS_MAX
"""Limit of the tenants that a process knows: each that has had a request stays, also without a limit of its own."""
_DIGEST_CHARACTERS: Final = 16

_log = logging.getLogger(__name__)


def limits_path(socket_path: Path, digest: str) -> Path:
    """Return where a server keeps the changed limits of a namespace: in the service's STATE_DIRECTORY if it has one,
    else beside its socket. `digest` is in hexadecimal.
    """
    folder = os.environ.get("STATE_DIRECTORY", "").split(":")[0] or socket_path.parent
    return Path(folder) / f"{socket_path.name}.limits-{digest[:_DIGEST_CHARACTERS]}"


def restore_limits(rows: PrimaryRows, path: Path) -> None:
    """Set the changed limits of an earlier process. A file that cannot be used changes none."""
    if not isinstance(rows, SharedRows) or not os.path.lexists(path):
        return
    try:
        rows.shares.change(_read(path))
    except (OSError, FormatError) as error:
        _log.warning("the changed limits of an earlier process are not used: %s", error)


def _read(path: Path) -> Mapping[str, str]:
    """Return the limits in a file of changes.

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
        return TypeAdapter(Limits).validate_python(kept.get("limits"))
    except ValidationError as error:
        (first, *_) = error.errors()
        where = ".".join(map(str, ("limits", *first["loc"])))
        raise FormatError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}") from error


class _OtherVersionError(FormatError):
    """Another release has written the file."""


def _keep(path: Path, changed: Mapping[str, str]) -> None:
    """Write a file of changes in place of an older one.

    Raises:
        ConfigError: It cannot be written, or the older one is of another release.
    """
    reason = "the change cannot be kept, and was not made"
    try:
        _read(path)
    except _OtherVersionError as error:
        raise ConfigError(f"{reason}: {error}; move the file away, and its changes are forgotten") from error
    except (OSError, FormatError):  # there is none, or nothing in it is lost
        pass
    try:
        text = json.dumps({"version": VERSION, "limits": changed}, indent=1)
        replace_file(os.fspath(path), text.encode() + b"\n", flush=True)
    except OSError as error:
        raise ConfigError(f"{reason}: {error.strerror or type(error).__name__}", location=os.fspath(path)) from error


def change_limit(rows: PrimaryRows, tenant: str, limit: str | None, path: Path | None) -> bool:
    """Set the share of a tenant, or with None take the change back; return whether it is kept over a restart.

    Raises:
        ConfigError: The stack has no shares, there would be too many, or the change cannot be kept.
    """
    shares = _shares(rows)
    with shares.lock:
        changed = {name: each for name, each in shares.changed.items() if name != tenant}
        if limit is not None:
            changed[tenant] = limit
        if len({**shares.given, **changed}) > LIMITS_MAX:
            raise ConfigError(f"expected limits of at most {LIMITS_MAX} tenants")
        if limit is not None and len({*shares.limits, *(each.name for each in shares.tenants), tenant}) > NAMES_MAX:
            raise ConfigError(
                f"{NAMES_MAX} tenants have had a limit or a request since this process began, and no other one can get "
                "a limit: begin it anew"
            )
        if path is not None:
            _keep(path, changed)
        shares.change(changed)
    return path is not None


def limits_report(rows: PrimaryRows) -> dict[str, Any]:  # Any: JSON
    """Return each tenant's share, and what it holds; see `docs/how-to/fair-shares.md`.

    Raises:
        ConfigError: The stack has no shares.
    """
    shares, block_bytes = _shares(rows), rows.backend.block_size
    limits, changed = shares.limits, shares.changed
    found = {tenant.name: tenant for tenant in shares.tenants}
    return {
        "capacity_bytes": rows.backend.num_blocks * block_bytes,
        "tenants": {
            name: {
                "limit": limits.get(name, limits[DEFAULT_TENANT]),
                "is_changed": name in changed,
                "share_bytes": shares.share_bytes(name),
                "used_bytes": found[name].held * block_bytes if name in found else 0,
                "evicted_blocks": found[name].evicted_blocks if name in found else 0,
            }
            for name in dict.fromkeys([*limits, *found])
        },
    }


def _shares(rows: PrimaryRows) -> FairShares:
    if not isinstance(rows, SharedRows):
        raise ConfigError("the stack has no shares: add 'limits: {}' to its file, and open it anew", location="limits")
    return rows.shares
