"""The stacks of a server: one for each namespace, opened when an engine needs it.

The server's thread owns them. Each stack is opened on a thread of its own. Two engines get one stack only if they
agree on the namespace. A failed opening fails only the engines that wait for it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tiered_kv.config.files import WarmSettings
from tiered_kv.config.hooks import tier_plugins
from tiered_kv.config.namespace import differences
from tiered_kv.config.reading import fill_variables, from_source
from tiered_kv.config.secrets import error_text
from tiered_kv.config.stack_config import MetricsSettings, StackConfig, load_config
from tiered_kv.config.units import format_bytes
from tiered_kv.config.validation import validate
from tiered_kv.direct.tiers import part_of
from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.server.served_stack import ServedStack
from tiered_kv.stack.limits import limits_path, restore_limits
from tiered_kv.system.threads import start_thread

if TYPE_CHECKING:
    from tiered_kv.stack.exporters.server import StatusServer
    from tiered_kv.stack.exporters.status import Observed

CLOSE_S: Final = 5.0
"""Seconds in which transfers may end when stacks are closed."""
WAITING_MAX: Final = 2048
"""Limit of the clients that wait for the opening of one stack."""
BLOCK_BYTES_MIN: Final = 128
"""The least size of a client's block. Beside the rows, the server needs 8 bytes for each row (24 during the opening),
and about 450 for each stored block. So a client makes it take at most some five times the capacity."""
_DIGEST_CHARACTERS: Final = 12
_LIST_CHARACTERS: Final = 16  # of the digest, in the name of a list, as in that of the file of resets

_log = logging.getLogger(__name__)

Opened = Callable[[ServedStack | TieredKVError], None]
CallSoon = Callable[[Callable[[], None]], None]
"""Makes a call on the server's thread."""


class Namespaces:
    """Opens stacks on threads of their own. The server's thread calls, and owns the stacks.

    Args:
        source: The stack's file, or a mapping. If it has no `namespace` and `block`, engines give them.
        count: How many namespaces there may be at a time. They divide the capacities evenly.
        warm: Settings of the warm start that go before those of the file; None if only the file decides. With these, a
            file without `warm` has its list beside the socket, or in the service's STATE_DIRECTORY.

    Attributes:
        socket_path: The path at which the server listens; None without a path. Set before a stack is opened.
        wake: Lets the server's thread see that a job of a tier has ended. The server sets it, any thread calls it.

    Raises:
        ConfigError: The file cannot be used.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Mapping[str, object],
        count: int = 1,
        warm: Mapping[str, object] | None = None,
    ) -> None:
        self._raw: dict[str, Any] = from_source(source, lambda raw: fill_variables(raw, os.environ))
        # The server, and no stack, serves the metrics: from its start, for all namespaces at one address.
        metrics = self._raw.pop("metrics", None)
        self._metrics = None if metrics is None else validate(MetricsSettings, metrics, ("metrics",))
        self._count, self._warm = count, warm
        self._own: StackConfig | None = None
        if "namespace" in self._raw:
            if "block" not in self._raw:
                raise ConfigError("leave it out as well: without 'block', engines bring both", location="namespace")
            self._own = load_config(source).model_copy(update={"metrics": None})
        if self._own is not None and count > 1:
            raise ConfigError(
                "the file has one namespace; leave it out where engines have several", location="namespace"
            )
        if "events" in self._raw and count > 1:
            raise ConfigError(
                "only one stack can publish at these addresses: start a server for each namespace, or leave it out",
                location="events",
            )
        if self._raw.get("record") and count > 1:
            message = "only one stack can record into this file: start a server for each namespace, or leave it out"
            raise ConfigError(message, location="record")
        if self._raw.get("warm") and count > 1:
            message = "only one stack can write this list: leave it out, and each has one beside the socket"
            raise ConfigError(message, location="warm")
        if self._raw.get("audit"):
            message = "a server compares no blocks: only an engine's own stack is audited; leave it out"
            raise ConfigError(message, location="audit")
        tiers = self._raw.get("secondary")
        for number, tier in enumerate(tiers if isinstance(tiers, list) else ()):
            if isinstance(tier, Mapping) and _is_host_client(tier.get("type")):
                raise ConfigError("a server has the host's cache: leave this tier out", location=f"secondary.{number}")
        self._stacks: dict[bytes, ServedStack] = {}
        self._opening: dict[bytes, list[Opened]] = {}
        """Clients that wait for the opening of a stack, by the digest of the namespace, as in `_stacks`."""
        self.wake: Callable[[], None] = lambda: None
        self.socket_path: Path | None = None

    @property
    def stacks(self) -> list[ServedStack]:
        """The open stacks. Any thread may read this."""
        return list(self._stacks.values())

    @property
    def tiers(self) -> str:
        """The tiers of the file with their capacities, for people."""
        tiers = [("cpu", self._raw.get("primary")), *((None, each) for each in self._raw.get("secondary") or ())]
        return ", ".join(_shown(name, each) for name, each in tiers if isinstance(each, Mapping))

    @property
    def descriptors(self) -> int:
        """Descriptors of the open stacks' tiers."""
        return sum(stack.descriptors for stack in self.stacks)

    def open_own(self) -> None:
        """Open the stack of the file, if it has a namespace, before any engine needs it."""
        if self._own is not None:
            self._stacks[self._own.identity.digest] = self._serve(self._own)

    def open_pages(self) -> StatusServer | None:
        """Return the server of metrics and status, which answers now; None without the setting. The caller closes it.

        Raises:
            ConfigError: It cannot listen, or a library is missing.
        """
        if self._metrics is None:
            return None
        from tiered_kv.stack.exporters.server import StatusServer, prefetch_of, routes_of

        def observed() -> Mapping[str, Observed]:
            observed = {stack.config.identity.digest.hex(): stack.observed() for stack in self.stacks}
            return {digest: replace(each, limits_path=self._limits_path(digest)) for digest, each in observed.items()}

        pages = StatusServer(*self._metrics.address)
        pages.start(routes_of(observed), prefetch_of(observed, self._metrics))
        return pages

    def open(self, settings: dict[str, Any] | None, call_soon: CallSoon, on_opened: Opened) -> None:  # Any: JSON
        """Call `on_opened` on the server's thread, with the stack of a namespace or with an error."""
        try:
            config = self._config_of(settings)
            digest = config.identity.digest
            if digest in self._stacks:
                on_opened(self._stacks[digest])
                return
            if len(self._opening.get(digest, ())) >= WAITING_MAX:  # most have ended this connection, and made a new one
                raise ConfigError(f"{WAITING_MAX} clients wait until the stack is open: try again")
            if digest not in self._opening:
                idle = self._idle_to_replace()
                start_thread(self._open, "tiered-kv-open", config, self._stacks.get(idle), call_soon)
                self._stacks.pop(idle, None)
            self._opening.setdefault(digest, []).append(on_opened)
        except TieredKVError as error:
            on_opened(error)

    def close(self) -> None:
        """Close all stacks. Their transfers have `CLOSE_S` together, and then each tier its own limit to end."""
        end_s = time.monotonic() + CLOSE_S
        while self._stacks:
            share_s = max(0.0, end_s - time.monotonic()) / len(self._stacks)
            _, stack = self._stacks.popitem()
            try:
                stack.close(share_s)
            except Exception:  # other stacks have blocks to write
                _log.exception("a stack cannot be closed")

    def _open(self, config: StackConfig, idle: ServedStack | None, call_soon: CallSoon) -> None:
        opened: ServedStack | TieredKVError
        try:
            if idle is not None:  # first: both stacks may have one directory
                idle.close(CLOSE_S)
            opened = self._serve(config)
        except TieredKVError as error:
            _log.error("a stack cannot be opened: %s", error_text(error, config.secret_texts()))
            opened = error
        except BaseException as error:  # SystemExit of a tier, too: engines that wait for the stack get an answer
            _log.exception("a stack cannot be opened")
            opened = TieredKVError(f"a stack cannot be opened: {type(error).__name__}")
        call_soon(lambda: self._opened(config.identity.digest, opened, call_soon))

    def _serve(self, config: StackConfig) -> ServedStack:
        stack = ServedStack(self._warmed(config), lambda: self.wake(), self.socket_path)
        if path := self._limits_path(config.identity.digest.hex()):
            restore_limits(stack.manager, path)
        return stack

    def _limits_path(self, digest: str) -> Path | None:
        return None if self.socket_path is None else limits_path(self.socket_path, digest)

    def _warmed(self, config: StackConfig) -> StackConfig:
        """Return the configuration with the settings of the warm start."""
        if self._warm is None:
            return config
        settings = (config.warm or WarmSettings()).model_copy(update=dict(self._warm))
        if settings.path is None and self.socket_path is not None and config.secondary:
            folder = os.environ.get("STATE_DIRECTORY", "").split(":")[0] or self.socket_path.parent
            name = f"{self.socket_path.name}.warm-{config.identity.digest.hex()[:_LIST_CHARACTERS]}"
            settings = settings.model_copy(update={"path": os.path.join(folder, name)})
        return config.model_copy(update={"warm": settings})

    def _opened(self, digest: bytes, opened: ServedStack | TieredKVError, call_soon: CallSoon) -> None:
        if isinstance(opened, ServedStack):
            self._stacks[digest] = opened
        for on_opened in self._opening.pop(digest):
            call_soon(partial(on_opened, opened))  # a call for each: there may be a thousand

    def _config_of(self, settings: dict[str, Any] | None) -> StackConfig:
        if settings is None:
            if self._own is None:
                raise ConfigError("the server's file has no namespace, and the client gives none", location="namespace")
            return self._own
        wanted = {name: settings.get(name) for name in ("namespace", "block")}
        config = validate(StackConfig, {**self._raw, **wanted})  # no variable of the server's is filled in for a client
        if self._own is not None:
            differing = differences(self._own.identity.described, config.identity.described)
            if differing:
                name, (ours, theirs) = next(iter(differing.items()))
                raise ConfigError(
                    f"the server has {name} {ours!r}, the engine {theirs!r}; leave namespace and block out of the "
                    "server's file, so that it takes those of engines",
                    location="namespace",
                )
            return self._own
        if config.block.bytes < BLOCK_BYTES_MIN:
            raise ConfigError(
                f"expected at least {BLOCK_BYTES_MIN} bytes from a client, found {config.block.bytes}: the server "
                "keeps numbers for each block, too",
                location="block.bytes",
            )
        if self._count == 1:
            return config
        directory, share = config.identity.digest.hex()[:_DIGEST_CHARACTERS], Fraction(1, self._count)
        primary = config.primary.model_copy(update={"capacity": config.primary.capacity // self._count})
        secondary = tuple(part_of(tier, directory, share) for tier in config.secondary)
        return config.model_copy(update={"primary": primary, "secondary": secondary})

    def _idle_to_replace(self) -> bytes:
        """Return the digest of a stack that no engine uses, if all places are taken; else b"".

        Raises:
            ConfigError: Engines use all stacks.
        """
        if len(self._stacks) + len(self._opening) < self._count:
            return b""
        idle = next((digest for digest, stack in self._stacks.items() if not stack.sessions), None)
        if idle is None:
            raise ConfigError(
                f"the server has {self._count} namespaces, all in use; start it with a larger --namespaces",
                location="namespace",
            )
        return idle


def _is_host_client(tier_type: object) -> bool:
    with suppress(ConfigError):  # for example an unknown type: the opening reports it
        return isinstance(tier_type, str) and ":" not in tier_type and tier_plugins().resolve(tier_type).is_host_client
    return False


def _shown(name: str | None, tier: Mapping[str, object]) -> str:
    capacity = tier.get("capacity")
    size = format_bytes(capacity) if isinstance(capacity, int) else str(capacity or "").strip()
    return f"{name or tier.get('name') or tier.get('type')} {size}".strip()
