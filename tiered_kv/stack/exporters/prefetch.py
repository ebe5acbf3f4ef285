"""`/prefetch`: routers ask over HTTP for blocks that they want in memory, for each stack that a listener serves.

The HTTP server's threads call it. It gives orders to a manager (`tiering/orders.py`), and reads their counts. What must
stay true: only callers with the token, or on loopback, are heard. A caller costs a bounded number of orders, and no
call waits for a block.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from email.message import Message as Headers
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from tiered_kv.base import OffloadKey, make_offload_key
from tiered_kv.errors import ConfigError
from tiered_kv.tiering.order import KEYS_MAX, ORDER_BLOCKS_MAX, ORDERS_MAX, UNTIL_S_MAX, PrefetchOrder
from tiered_kv.tiering.orders import PrefetchOrders

if TYPE_CHECKING:
    from tiered_kv.stack.exporters.status import Observed

PATH: Final = "/prefetch"
BODY_BYTES_MAX: Final = 1 << 20
ACTION: Final = "kv.prefetch"
"""The action of the field's envelope (see `tiered_kv.hints`) that means the same call."""
_HASH_BYTES_MAX: Final = 64
_UNTIL_S: Final = 10.0
_FIELDS: Final = frozenset({"namespace", "block_hashes", "group", "until"})
Answer = tuple[HTTPStatus, object]
"""A status, and what is sent as JSON."""
Choose = Callable[[str], "Observed"]
"""Returns the stack whose namespace begins with a text; raises `ConfigError` if it is none or several."""


class PrefetchPages:
    """The orders that callers of one listener have given.

    Args:
        choose: Returns the stack that a call names.
        token: What callers must send; None if none is needed.
    """

    def __init__(self, choose: Choose, token: str | None) -> None:
        self.choose, self._token = choose, token
        self._lock = threading.Lock()
        """Guards `_orders`; never held for longer than a pass over them."""
        self._orders: dict[str, tuple[PrefetchOrder, PrefetchOrders]] = {}

    def refusal(self, host: str, headers: Headers) -> Answer | None:
        """Return why a caller is not heard; None if it is. `host` is the address at which the server listens."""
        if self._token is not None:
            given = headers.get("Authorization", "").removeprefix("Bearer ").strip()
            if hmac.compare_digest(given.encode(errors="replace"), self._token.encode()):
                return None
            return _error(HTTPStatus.UNAUTHORIZED, "expected the header 'Authorization: Bearer' with metrics.token")
        # A page in a browser of this machine can send a name of its own here, though its name leads to loopback.
        if _is_loopback(host) and _is_loopback(_name_in(headers.get("Host", ""))):
            return None
        return _error(HTTPStatus.FORBIDDEN, "only callers on loopback are heard without metrics.token: set it")

    def answer(self, method: str, path: str, headers: Headers, body: bytes) -> Answer:
        """Answer a call that `refusal` lets through."""
        name = path.removeprefix(PATH).strip("/")
        if method == "POST" and not name:
            if headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
                return _error(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "expected Content-Type: application/json")
            return self._begin(body)
        if not name or method not in ("GET", "HEAD", "DELETE"):
            return _error(HTTPStatus.METHOD_NOT_ALLOWED, f"there are: POST {PATH}, GET and DELETE {PATH}/ID")
        with self._lock:
            self._forget()
            found = self._orders.pop(name, None) if method == "DELETE" else self._orders.get(name)
        if found is None:
            return _error(HTTPStatus.NOT_FOUND, "there is no such prefetch, or it has ended")
        order, orders = found
        if method == "DELETE":
            orders.drop(name)
            return HTTPStatus.OK, {"id": name, **order.counts()}
        return HTTPStatus.OK, {"id": name, "seconds_left": max(0.0, order.until_s - time.monotonic()), **order.counts()}

    def _begin(self, body: bytes) -> Answer:
        asked = _asked(body)
        stack = self.choose(asked["namespace"])
        keys, unknown = _keys(stack, asked["block_hashes"], asked["group"])
        orders = stack.manager.orders
        order = PrefetchOrder(secrets.token_hex(8), keys, time.monotonic() + asked["until"], unknown)
        with self._lock:
            self._forget()
            blocks = sum(len(each.keys) for each, _ in self._orders.values())
            if len(self._orders) >= ORDERS_MAX or blocks + len(keys) > KEYS_MAX:
                return _error(
                    HTTPStatus.TOO_MANY_REQUESTS,
                    f"there are {len(self._orders)} prefetches of {blocks} blocks, of at most {ORDERS_MAX} of "
                    f"{KEYS_MAX}: wait until they end, or end some",
                )
            self._orders[order.name] = order, orders
        orders.give(order)
        return HTTPStatus.ACCEPTED, {"id": order.name}

    def _forget(self) -> None:
        """Forget the orders that have ended, with the lock held."""
        now_s = time.monotonic()
        over = [name for name, (order, _) in self._orders.items() if order.is_ended or order.until_s <= now_s]
        for name in over:
            del self._orders[name]


def _asked(body: bytes) -> dict[str, Any]:  # Any: checked values
    """Return the fields of a call.

    Raises:
        ConfigError: It is none.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        asked = None
    if isinstance(asked, dict) and "action_type" in asked:
        if asked["action_type"] != ACTION or str(asked.get("action_version", "")).partition(".")[0] != "1":
            raise ConfigError(f"expected the action {ACTION}@1.0")
        asked = asked.get("payload")
    if not isinstance(asked, dict) or not asked.keys() <= _FIELDS or "block_hashes" not in asked:
        raise ConfigError(f"expected a JSON object with 'block_hashes', and no other fields than {sorted(_FIELDS)}")
    hashes, until = asked["block_hashes"], asked.get("until", _UNTIL_S)
    group, namespace = asked.get("group", 0), asked.get("namespace", "")
    if not isinstance(hashes, list) or not 1 <= len(hashes) <= ORDER_BLOCKS_MAX:
        raise ConfigError(f"block_hashes: expected a list of 1 to {ORDER_BLOCKS_MAX}")
    if type(until) not in (int, float) or not 0 < until <= UNTIL_S_MAX:
        raise ConfigError(f"until: expected seconds, more than 0 and at most {UNTIL_S_MAX:.0f}")
    if type(group) is not int or not 0 <= group < 1 << 32:
        raise ConfigError("group: expected the number of a KV cache group")
    if not isinstance(namespace, str):
        raise ConfigError("namespace: expected the first characters of a digest")
    return {"block_hashes": hashes, "until": float(until), "group": group, "namespace": namespace}


def _keys(stack: Observed, hashes: Sequence[object], group: int) -> tuple[list[OffloadKey], int]:
    """Return the keys, each once, and how many blocks are unknown here.

    Raises:
        ConfigError: One is no hash.
    """
    names = [each for each in hashes if type(each) is int and 0 <= each < 1 << 64]
    texts = [each for each in hashes if type(each) is str]
    found_hashes: list[bytes] = []
    with suppress(ValueError):
        found_hashes = list(map(bytes.fromhex, texts))  # no loop: the manager's thread waits for this one
    is_whole = len(names) + len(found_hashes) == len(hashes)
    if not is_whole or not all(0 < size <= _HASH_BYTES_MAX for size in set(map(len, found_hashes))):
        raise ConfigError(
            f"block_hashes: expected hashes of up to {_HASH_BYTES_MAX} bytes in hexadecimal, or their last 64 bits as "
            "numbers"
        )
    whole = [make_offload_key(each, group) for each in found_hashes]
    if names:
        if stack.history is None:
            raise ConfigError("without a history only whole hashes are known: its setting is 0", location="history")
        found = stack.history.keys_of(names, group)
        whole += [key for key in found if key is not None]
        return list(dict.fromkeys(whole)), found.count(None)
    return list(dict.fromkeys(whole)), 0


def _error(status: HTTPStatus, text: str) -> Answer:
    return status, {"error": text}


def _name_in(host: str) -> str:
    """Return the name of a header `Host`, without the port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False
