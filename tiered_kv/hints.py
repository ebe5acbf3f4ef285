"""Hints of a request about its blocks. They are evidence for the policy, not commands.

A hint comes in `ReqContext.kv_transfer_params`, beside the engine's own parameters:

    {"tiered_kv": {"priority": 1, "ttl": 600, "expect_return": 20, "skip": "store", "tenant": "team-a"}}

Clients write them, so they are validated strictly. Invalid hints are ignored. A manager reads them with its
`HintReader`, on its own thread.

A router may send them in the envelope of vLLM 0.33 (`vllm.v1.kv_hints`) and SGLang 0.5.23 (`managers/kv_hints.py`), as
`ReqContext.kv_hints` or, as Dynamo does, in the parameters under `kv_hint`. Engines define no action. The actions come
from vLLM's and SGLang's discussions (vLLM 37003 and 51428, SGLang 27574) and from Dynamo's policies.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

_log = logging.getLogger(__name__)

HINTS_KEY: Final = "tiered_kv"
SESSION_KEY: Final = "session_id"
"""The entry of `kv_transfer_params` that names a request's session, for recordings."""
TENANT_KEY: Final = "tenant"
"""The entry beside the hints that names the tenant for whose share of the memory the request's blocks count."""
TENANT_PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
DEFAULT_TENANT: Final = "default"
"""The tenant of requests that name none."""
HintName = Literal["priority", "ttl", "expect_return", "skip"]
HINT_NAMES: Final[tuple[HintName, ...]] = get_args(HintName)
ENVELOPE_KEY: Final = "kv_hint"
ACTION: Final = "tiered_kv.hints"
"""The action that carries our own hints."""
ACTIONS_MAX: Final = 64
"""Limit of the actions in one envelope."""
_TENANT: Final = re.compile(TENANT_PATTERN)
SECONDS_MAX: Final = 604_800.0
"""The longest time in a hint: a week."""


@dataclass(frozen=True, slots=True)
class Hints:
    """The hints of a request about the blocks that it is the last to use."""

    priority: int = 0  # value of hits in these blocks, compared with other requests': -1, 0 or 1
    ttl_s: float | None = None
    """Seconds after which no request will use the blocks."""
    expect_return_s: float | None = None
    """Seconds after which a request will probably use the blocks."""
    skips_store: bool = False
    """Whether the request's new blocks are not stored."""
    skips_load: bool = False  # it loads no blocks, and computes its whole prompt
    tenant: str = ""
    """For whose share of the memory the request's blocks count; no hint, and read with any `hints` of the stack."""

    @classmethod
    def parse(cls, given: object, allowed: Collection[str] = HINT_NAMES) -> Hints:
        """Return the `allowed` hints of a mapping.

        Raises:
            ValueError: It is no mapping of `HINT_NAMES` and `TENANT_KEY`, or a value is invalid. The message repeats no
                value.
        """
        if not isinstance(given, Mapping) or not all(name in HINT_NAMES or name == TENANT_KEY for name in given):
            raise ValueError(f"expected a mapping of {', '.join(HINT_NAMES)} and {TENANT_KEY}")
        hints = {name: given[name] for name in allowed if given.get(name) is not None}
        priority = hints.get("priority", 0)
        if type(priority) is not int or not -1 <= priority <= 1:
            raise ValueError("priority: expected -1, 0 or 1")
        skip = hints.get("skip", ())
        skipped = (skip,) if isinstance(skip, str) else skip
        if not isinstance(skipped, (list, tuple)) or not all(what in ("store", "load") for what in skipped):
            raise ValueError("skip: expected 'store', 'load', or a list of both")
        tenant = given.get(TENANT_KEY)
        if tenant is not None and not (isinstance(tenant, str) and _TENANT.fullmatch(tenant)):
            raise ValueError("tenant: expected a name of up to 64 letters, digits, '.', '_' and '-'")
        return cls(
            priority,
            _seconds(hints, "ttl"),
            _seconds(hints, "expect_return"),
            skips_store="store" in skipped,
            skips_load="load" in skipped,
            tenant=tenant or "",
        )

    def given(self) -> dict[str, object] | None:
        """Return the mapping that `parse` takes; None without hints."""
        if self == _NONE:
            return None
        skip = [name for name, skips in (("store", self.skips_store), ("load", self.skips_load)) if skips]
        given: dict[str, object] = {
            "priority": self.priority,
            "ttl": self.ttl_s,
            "expect_return": self.expect_return_s,
            "skip": skip,
        }
        return {**given, TENANT_KEY: self.tenant} if self.tenant else given


_NONE: Final = Hints()


def _seconds(hints: Mapping[str, Any], name: str) -> float | None:
    value = hints.get(name)
    if value is not None and not (type(value) in (int, float) and 0 <= value <= SECONDS_MAX):
        raise ValueError(f"{name}: expected seconds from 0 to {SECONDS_MAX:.0f}")
    return value


class HintReader:
    """Parses the hints of requests, and counts them. Owned by one thread.

    Args:
        allowed: The hints that are used; others are ignored.

    Attributes:
        hinted: Number of requests with hints.
        refused: Number of requests with invalid hints; the first is logged.
        ignored_actions: Number of actions in envelopes that mean no hint.
    """

    def __init__(self, allowed: Collection[str] = HINT_NAMES) -> None:
        self.hinted = self.refused = self.ignored_actions = 0
        self._allowed = allowed

    def read(self, req_context: Any) -> Hints | None:  # Any: ours, or vLLM's
        """Return the hints of a request; None if it has none, or they are invalid. Its own override an envelope's."""
        params = req_context.kv_transfer_params
        envelope, given = getattr(req_context, "kv_hints", None), None
        if isinstance(params, Mapping):
            envelope, given = envelope or params.get(ENVELOPE_KEY), params.get(HINTS_KEY)
        if envelope is None and given is None:
            return None
        if not self._allowed and not (isinstance(given, Mapping) and TENANT_KEY in given):
            return None
        try:
            if envelope is not None:
                meant = self._meant_by(envelope)
                given = meant or None if given is None else {**meant, **given}
            if given is None:
                return None
            hints = Hints.parse(given, self._allowed)
        except (ValueError, TypeError, AttributeError) as error:
            self.refused += 1
            if self.refused == 1:
                _log.warning("invalid hints are ignored; the first: %s", error)
            return None
        self.hinted += hints != Hints(tenant=hints.tenant)
        return hints

    def _meant_by(self, envelope: object) -> dict[str, object]:
        """Return the hints that an envelope's actions mean."""
        actions = _part(envelope, "actions")
        if not isinstance(actions, (list, tuple)) or len(actions) > ACTIONS_MAX:
            raise ValueError(f"{ENVELOPE_KEY}: expected up to {ACTIONS_MAX} actions")
        meant: dict[str, object] = {}
        for action in actions:
            hints = _hints_of(action)
            if hints is None:
                self.ignored_actions += 1
            else:
                meant.update(hints)
        return meant


def _hints_of(action: object) -> Mapping[str, object] | None:
    """Return the hints that one action means; None if it is unknown, or concerns the blocks of other requests."""
    name, version, payload = (_part(action, part) for part in ("action_type", "action_version", "payload"))
    payload = payload or {}
    if not isinstance(payload, Mapping):
        raise ValueError(f"{ENVELOPE_KEY}: expected a mapping as payload")
    if str(version).partition(".")[0] != "1":
        return None
    if name == ACTION:
        return payload
    if "session_id" in payload or ("block_hashes" in payload and not payload.get("include_current_request")):
        return None
    if name == "kv.prefetch":
        return {}  # a request's blocks are fetched without it
    if name in ("kv.deref", "kv.evict"):
        return {"ttl": 0}
    return _retained(payload) if name == "kv.retain" else None


def _retained(payload: Mapping[str, Any]) -> dict[str, object]:
    """Return the hints of `kv.retain`. Of its ranges of tokens, the last in the prompt counts, the request's own."""
    own: Any = payload
    if payload.get("directives") is not None:
        of_prompt = [each for each in reversed(payload["directives"]) if not _part(each, "covers_output")]
        own = max(of_prompt, key=lambda each: each.get("start") or 0, default=None)
    if own is None:
        return {}
    priority, duration = own.get("priority"), own.get("duration")
    seconds = own.get("ttl_seconds") if duration is None else duration
    if type(priority) is not int or priority < 0:
        raise ValueError("kv.retain: expected a priority from 0")
    return {"priority": 1, "ttl": seconds and min(seconds, SECONDS_MAX)} if priority else {"ttl": 0}


def _part(of: Any, name: str) -> Any:  # Any: a msgspec.Struct of the engine's, or JSON
    return of.get(name) if isinstance(of, Mapping) else getattr(of, name, None)
