"""The ends of a copy, as the command names them: a tier of a stack's file, a directory, or a server's URL.

`copy`, `export` and `import` call it on the main thread. What must stay true: a place that cannot be meant is a
`ConfigError` that says which forms there are, and no error shows a password of a URL.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from tiered_kv.cli.stacks import OperatedStack, administer, chosen_tiers, operated_stack
from tiered_kv.cli.time_limit import TimeLimit
from tiered_kv.config.entries import tier_settings
from tiered_kv.config.hooks import TierType, tier_plugins
from tiered_kv.config.settings import TierSettings
from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.toolkit.administration import StoredNamespace, block_bytes_in
from tiered_kv.toolkit.codecs import CodecSet, CodecSettings

FORMS: Final = (
    "STACK.yaml or STACK.yaml:TIER, a directory with blocks, TYPE:DIRECTORY for a new one such as fs:/backup, "
    "or a URL such as redis://host:6379/0"
)
_LOOK_S: Final = 30.0
_ANY_CAPACITY: Final = "1TiB"  # of a directory that is only read


@dataclass(frozen=True, slots=True)
class Place:
    """One end of a copy.

    Attributes:
        text: As the user gave it.
        settings: Of the tier. For a directory without a stack's file, its capacity is a guess.
        stack: The stack's file, if one was given.
    """

    text: str
    settings: TierSettings
    stack: OperatedStack | None = None

    @property
    def codecs(self) -> CodecSet | None:
        """The codecs of a stack's tier; None if they are not known, or if the tier has none."""
        is_known = self.stack is not None and isinstance(self.settings, CodecSettings)
        return self.settings.open_codecs() if is_known and isinstance(self.settings, CodecSettings) else None

    @property
    def stands_for_directory(self) -> bool:
        """Whether it is a directory without a stack's file."""
        return self.stack is None and self.settings.storage_facts().directory is not None


@dataclass(frozen=True, slots=True)
class CopiedNamespace:
    """The namespace whose blocks are copied."""

    digest: str
    described: dict[str, object]
    block_bytes: int


def place_of(text: str) -> Place:
    """Return the place that the user means.

    Raises:
        ConfigError: It is no place, or its file cannot be used.
    """
    scheme, is_url, _ = text.partition("://")
    if is_url:
        return Place(f"{scheme}://...", _settings(_type(scheme), {"url": text}))
    if os.path.isdir(text):
        return Place(text, _found_in(text))
    name: str | None = None
    file, colon, rest = text.rpartition(":")
    if not os.path.exists(text) and colon:
        if not os.path.isfile(file) and file in tier_plugins().tier_types():
            tier_type = _type(file)
            if tier_type.settings.storage_settings.directory not in tier_type.settings.model_fields:
                raise ConfigError(f"tiers of type '{file}' keep no directory; expected {FORMS}")
            return Place(text, _settings(tier_type, _of_directory(tier_type, rest)))
        text, name = file, rest
    if not os.path.isfile(text):
        raise ConfigError(f"there is no file or directory '{text}'; expected {FORMS}")
    stack = operated_stack(argparse.Namespace(stack=text))
    tiers = chosen_tiers(stack.config, name, f"{text}:{name}")
    if len(tiers) != 1:
        names = ", ".join(tier.name for tier in tiers) or "none"
        raise ConfigError(f"{text} has the tiers {names}: expected {text}:TIER")
    return Place(f"{text}:{tiers[0].name}", tiers[0], stack)


def namespace_of(place: Place, digest: str | None) -> CopiedNamespace:
    """Return the namespace to copy from a place: the one with `digest`, the stack's own, or the only one there.

    Raises:
        ConfigError: Several may be meant, or it is not known how long its blocks are.
        TieredKVError: The storage cannot be used.
    """
    stack = place.stack
    if stack is not None and stack.is_whole and digest in (None, stack.digest):
        identity = stack.config.identity
        return CopiedNamespace(identity.digest.hex(), dict(identity.described), stack.config.block.bytes)
    stored = stored_namespaces(place)
    chosen = [each for each in stored if digest in (None, each.digest)]
    if digest is None and stack is not None and stack.stored:  # an engine's stack: those with its fields
        chosen = [each for each in stored if each.digest in stack.stored]
    if not chosen:
        raise ConfigError(f"{place.text} has no blocks" + ("" if digest is None else f" of the namespace {digest}"))
    if len(chosen) > 1:
        listed = "".join(f"\n  {each.digest} (tenant {each.tenant or 'unknown'})" for each in chosen)
        raise ConfigError(f"{place.text} has {len(chosen)} namespaces; give --namespace DIGEST:{listed}")
    (found,) = chosen
    block_bytes = block_bytes_in(found.described)
    if block_bytes is None:
        raise ConfigError(
            f"{place.text} has no readable form of the namespace {found.digest}, so the size of its blocks is not "
            "known; name a stack's file that has 'block' and 'namespace'"
        )
    return CopiedNamespace(found.digest, dict(found.described), block_bytes)


def stored_namespaces(place: Place) -> Sequence[StoredNamespace]:
    """Return the namespaces of a place. Raises `ConfigError` with the storage's error."""
    found, error = administer(
        place.settings, lambda each: each.namespaces(time.monotonic() + _LOOK_S), TimeLimit(_LOOK_S)
    )
    if error is None:
        raise no_copies(place)
    if error:
        raise ConfigError(f"{place.text}: {error}")
    return found or ()


def no_copies(place: Place) -> ConfigError:
    """Return the error for a tier whose type cannot take part in a copy."""
    return ConfigError(
        f"{place.text}: tiers of type '{place.settings.type}' give no blocks to a copy; copy another tier of the stack"
    )


def _type(name: str) -> TierType:
    tier_type = tier_plugins().tier_types().get(name)
    if tier_type is None:
        raise ConfigError(f"no tier type is called '{name}'; expected {FORMS}")
    return tier_type


def _settings(tier_type: TierType, entry: dict[str, object]) -> TierSettings:
    if "url" in entry and "url" not in tier_type.settings.model_fields:
        raise ConfigError(f"tiers of type '{tier_type.name}' have no URL; name them in a stack's file")
    return tier_settings({"type": tier_type.name, **entry})


def _of_directory(tier_type: TierType, path: str) -> dict[str, object]:
    names = tier_type.settings.storage_settings
    return {names.directory: str(Path(path).absolute()), names.capacity: _ANY_CAPACITY}


def _found_in(path: str) -> TierSettings:
    """Return the settings of the tier that wrote a directory."""
    errors = []
    for tier_type in tier_plugins().tier_types().values():
        if tier_type.administration is None:
            continue
        try:
            settings = _settings(tier_type, _of_directory(tier_type, path))
        except (TieredKVError, ValidationError):
            continue  # its settings are not those of a directory
        found, error = administer(
            settings, lambda each: each.namespaces(time.monotonic() + _LOOK_S), TimeLimit(_LOOK_S)
        )
        if found:
            return settings
        if error:
            errors.append(f"\n  as {tier_type.name}: {error}")
    raise ConfigError(f"no tier has written blocks into '{path}'{''.join(errors)}")
