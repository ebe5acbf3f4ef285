"""The factory of secondary tiers: it makes them from their settings.

A stack, `DirectTiers` and vLLM's tier call it when they open, on the thread that opens them. What must stay true: a
`required` tier is open when `create` returns, or `create` raises. Others delay an opening by at most `_OPTIONAL_S`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from tiered_kv.config.entries import tier_settings, tier_type_of
from tiered_kv.config.secrets import scrub
from tiered_kv.config.settings import ClassArguments, TierSettings
from tiered_kv.config.validation import suggestion
from tiered_kv.errors import (
    ConfigError,
    ResourceError,
    TieredKVError,
    TierError,
    TierUnavailableError,
    remedy_of,
)
from tiered_kv.system.threads import call_within
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.tiering.late import LateTier

_SEED_ARGUMENTS = 3
"""offloading_spec, primary_kv_view, tier_type."""

_OPTIONAL_S: Final = 5.0
"""Seconds, at most, that an opening waits for a tier that is not `required`."""
_OF_SUPER = ("tier_type", "tier_spec", "is_nonblocking", "takes_offsets")  # attributes of every tier
_NO_SUPER = "its class does not call super().__init__(offloading_spec, primary_kv_view, tier_type)"


class SecondaryTierFactory:
    """Constructs tiers. `tier_plugins()` knows their types."""

    @staticmethod
    def create(
        offloading_spec: object, primary_kv_view: memoryview, settings: TierSettings | Mapping[str, object]
    ) -> SecondaryTierManager:
        """Construct a tier.

        Args:
            offloading_spec: See `SecondaryTierManager`.
            primary_kv_view: See `SecondaryTierManager`.
            settings: The tier's entry, or its settings.

        Raises:
            ConfigError: The settings or a key file are invalid, or a library is missing.
            TierError: The tier cannot be opened. Other exceptions of a tier become a `TierError` without the secrets of
                its settings.
        """
        checked = tier_settings(settings)
        tier_type = tier_type_of(checked)
        arguments: list[object] = [offloading_spec, primary_kv_view, tier_type.name]
        keywords: dict[str, object] = {}
        if isinstance(checked, ClassArguments):
            keywords = checked.arguments
        elif tier_type.settings is not TierSettings:
            arguments.append(checked)
        try:
            loaded = tier_type.load()
            if not (isinstance(loaded, type) and issubclass(loaded, SecondaryTierManager)):
                message = f"loads {loaded!r}, which is no subclass of SecondaryTierManager"
                raise ConfigError(f"tier type '{tier_type.name}' {message}")
            tier_class: Callable[..., SecondaryTierManager] = loaded  # each has arguments of its own
            _check_keywords(tier_class, keywords, checked.name)

            def open_it() -> SecondaryTierManager:
                tier = tier_class(*arguments, **keywords)
                # A property of a third-party class may raise; here the error gets the tier's name.
                if not all(hasattr(tier, name) for name in _OF_SUPER):
                    raise TierError(_NO_SUPER, tier=checked.name, operation="open")
                return tier

            def stand_in() -> LateTier:
                offsets = loaded.takes_offsets is True
                return LateTier(
                    offloading_spec, primary_kv_view, tier_type.name, checked, open_it, takes_offsets=offsets
                )

            return _within_its_time(checked, open_it, stand_in)
        except ResourceError as error:
            reason = str(error)
        except (TieredKVError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a third-party module or constructor may raise anything, SystemExit too
            reason = f"{type(error).__name__}: {scrub(str(error), checked.secret_texts())}{remedy_of(error)}"
        # Raised outside of the handler, without a context: the original message may contain secrets.
        raise TierError(reason, tier=checked.name, operation="open")


def _within_its_time(
    settings: TierSettings,
    open_it: Callable[[], SecondaryTierManager],
    stand_in: Callable[[], LateTier],
) -> SecondaryTierManager:
    """Return the open tier. If it is not `required` and not open in time, return a `LateTier` that stands for it."""
    if not settings.required:
        late = stand_in()
        return late.wait(min(_OPTIONAL_S, settings.open_timeout)) or late
    try:
        return call_within(settings.open_timeout, open_it, f"tiered-kv-{settings.name}-open", undo=_shut_down)
    except TimeoutError as error:
        raise TierUnavailableError(
            f"{error}{settings.storage_facts().from_directory}; a mount or a device may hang. Mount it again, raise "
            "open_timeout, or write 'required: false' to begin without this tier",
            tier=settings.name,
            operation="open",
        ) from None


def _shut_down(tier: SecondaryTierManager) -> None:
    with suppress(Exception):  # a third-party tier that was opened too late
        tier.shutdown()


def _check_keywords(tier_class: Callable[..., object], keywords: Mapping[str, object], name: str) -> None:
    accepted = _keywords_of(tier_class)
    if accepted is None:
        return
    hints = TierSettings.unknown_key_advice
    unknown = ", ".join(
        f"'{keyword}'" + (f" ({hints[keyword]})" if keyword in hints else suggestion(keyword, accepted))
        for keyword in keywords
        if keyword not in accepted
    )
    if unknown:
        raise ConfigError(
            f"tier '{name}' has unknown keys {unknown}; besides those of every tier its class takes: "
            f"{', '.join(accepted) or 'none'}"
        )


def _keywords_of(tier_class: Callable[..., object]) -> list[str] | None:
    """Return a class's keyword arguments beside the first three; None if it takes any keyword, or hides them."""
    try:
        parameters = inspect.signature(tier_class).parameters.values()
    except (TypeError, ValueError):  # a class of an extension module, for example
        return None
    accepted, seeds_left = [], _SEED_ARGUMENTS
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            return None
        is_positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if is_positional and seeds_left:
            seeds_left -= 1
        elif parameter.kind is parameter.VAR_POSITIONAL:
            seeds_left = 0
        elif parameter.kind is not parameter.POSITIONAL_ONLY:
            accepted.append(parameter.name)
    return accepted
