"""`/hottest`: the keys of the hottest blocks in a stack's memory, which another stack asks for at its start.

The HTTP server's threads answer; the thread of a `WarmStart` asks. A caller gets pages of one list, which is made when
the first page is asked for. What must stay true: only callers that `/prefetch` hears get keys, and they cost the stack
one pass over its rows in `LIST_S` at most.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.hottest import hottest_keys
from tiered_kv.errors import ConfigError, FormatError, TierUnavailableError
from tiered_kv.stack.exporters.client import bearer, fetch
from tiered_kv.stack.exporters.status import Observed

PATH: Final = "/hottest"
PAGE_KEYS: Final = 4096
KEYS_MAX: Final = 1 << 20
LIST_S: Final = 10.0
"""How old a list may be when its first page is asked for: then it serves several callers."""
_KEEP_S: Final = 60.0  # how long the other pages of a list are there
_ASK_S: Final = 60.0  # how long another stack may take for all pages
_NUMBER_DIGITS_MAX: Final = 9


class HottestPages:
    """The lists of the stacks of one listener. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards `_lists`. Held while a list is made: a second caller waits for it, and makes no other one."""
        self._lists: dict[str, tuple[float, Sequence[OffloadKey]]] = {}  # by namespace, with the time of the making

    def answer(self, stack: Observed, query: Mapping[str, Sequence[str]]) -> dict[str, object]:
        """Answer `/hottest?first=N` with the keys from number N on; see `docs/how-to/warm-start.md`.

        Raises:
            ConfigError: The query is invalid, or the list of earlier pages is gone.
        """
        if unknown := query.keys() - {"first", "namespace"}:
            raise ConfigError(f"expected 'first', found {sorted(unknown)}")
        text = "".join(query.get("first", ["0"]))
        if not text.isascii() or not text.isdigit() or len(text) > _NUMBER_DIGITS_MAX:
            raise ConfigError(f"first: expected the number of a key, found {text[:80]!r}")
        first, digest = int(text), stack.config.identity.digest.hex()
        keys = self._list(stack, digest, is_new=not first)
        end = first + PAGE_KEYS
        return {
            "namespace": digest,
            "block_bytes": stack.config.block.bytes,
            "keys": [key.hex() for key in keys[first:end]],
            "next": end if end < len(keys) else None,
        }

    def _list(self, stack: Observed, digest: str, *, is_new: bool) -> Sequence[OffloadKey]:
        with self._lock:
            now_s = time.monotonic()
            for name in [name for name, (made_s, _) in self._lists.items() if now_s > made_s + _KEEP_S]:
                del self._lists[name]
            if is_new and (digest not in self._lists or now_s > self._lists[digest][0] + LIST_S):
                self._lists[digest] = now_s, hottest_keys(stack.manager.primary, KEYS_MAX)
            if digest not in self._lists:
                raise ConfigError("the list of the pages before is gone: begin with 'first=0'")
            return self._lists[digest][1]


def ask_hottest(url: str, digest: str, block_bytes: int, token: str | None, keys_max: int) -> list[OffloadKey]:
    """Return the keys of the hottest blocks in the memory of another stack, the hottest first.

    Raises:
        ConfigError, TierUnavailableError: It does not answer, or has no such namespace.
        FormatError: The answer cannot be read.
    """
    headers = {} if token is None else bearer(token)
    keys: dict[OffloadKey, None] = {}
    first: int | None = 0
    end_s = time.monotonic() + _ASK_S
    while first is not None and len(keys) < keys_max:
        if time.monotonic() > end_s:
            raise TierUnavailableError(f"{url} has not sent its list in {_ASK_S:.0f} s", operation="warm start")
        try:
            page = _page(fetch(url, f"{PATH}?namespace={digest}&first={first}", headers=headers))
        except TierUnavailableError as error:
            raise TierUnavailableError(f"{url}: {error}", operation="warm start") from error
        if page["namespace"] != digest or page["block_bytes"] != block_bytes:
            raise FormatError(f"{url} has another namespace", operation="warm start")
        known = len(keys)
        keys.update(dict.fromkeys(page["keys"]))
        if page["next"] is not None and (page["next"] <= first or len(keys) == known):
            raise FormatError(f"{url} answers with the same page again", operation="warm start")
        first = page["next"]
    return list(keys)[:keys_max]


def _page(body: bytes) -> dict[str, Any]:  # Any: checked values
    try:
        page = json.loads(body)
        keys = [OffloadKey(bytes.fromhex(key)) for key in page["keys"]]
        following = page["next"]
        if not all(keys) or len(keys) > PAGE_KEYS or not (following is None or type(following) is int):
            raise ValueError("no page")
        return {"namespace": page["namespace"], "block_bytes": page["block_bytes"], "keys": keys, "next": following}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(
            "the answer is no page of keys: is the other release older?", operation="warm start"
        ) from error
