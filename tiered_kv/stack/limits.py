"""The limits of tenants while a stack runs: changes of them, and the file that keeps these over a restart.

The HTTP server's threads change and read them; a host's server reads the file when it opens a stack. The primary tier
takes a change with its next store. What must stay true: a changed limit goes before that of the stack's file until it
is taken back, and the file is whole or as it was before.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from tiered_kv.config.limits import DEFAULT_TENANT, LIMITS_MAX, Limits
from tiered_kv.cpu.policies.shares import FairShares
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.cpu.shared_rows import SharedRows
from tiered_kv.errors import ConfigError
from tiered_kv.toolkit.small_files import read_file, replace_file

VERSION: Final = 1
FILE_BYTES_MAX: Final = 1 << 20
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
        kept = json.loads(read_file(os.fspath(path), FILE_BYTES_MAX) or b"")
        if not isinstance(kept, dict) or kept.get("version") != VERSION:
            raise ValueError("another version")
        rows.shares.change(TypeAdapter(Limits).validate_python(kept.get("limits")))
    except (OSError, ValueError, RecursionError, ValidationError) as error:
        _log.warning("changed limits in %s are not used: %s", path, type(error).__name__)


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
        if path is not None:
            try:
                text = json.dumps({"version": VERSION, "limits": changed}, indent=1)
                replace_file(os.fspath(path), text.encode() + b"\n", flush=True)
            except OSError as error:
                message = f"the change cannot be kept, and was not made: {error.strerror or type(error).__name__}"
                raise ConfigError(message, location=os.fspath(path)) from error
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
