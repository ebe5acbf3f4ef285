"""A stack's file, completed for the operator's verbs: an engine's has no `block.bytes`, and only a part of a namespace.

The storage of the tiers has the rest: beside its blocks, each namespace is stored in readable form. Verbs call these
functions on the main thread; `administer` calls a storage on the thread of a `TimeLimit`. What must stay true: no
error text of a tier shows a secret.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from logging.handlers import MemoryHandler
from operator import methodcaller
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from tiered_kv.cli.arguments import size
from tiered_kv.cli.output import progress
from tiered_kv.cli.time_limit import TimeLimit
from tiered_kv.config.entries import tier_type_of
from tiered_kv.config.namespace import Namespace, differences
from tiered_kv.config.reading import from_source
from tiered_kv.config.secrets import error_text, scrub
from tiered_kv.config.settings import TierSettings
from tiered_kv.config.stack_config import StackConfig, load_config
from tiered_kv.config.units import format_bytes
from tiered_kv.errors import ConfigError, TierError
from tiered_kv.toolkit.administration import DIGEST_HEX, StoredNamespace, TierAdministration, block_bytes_in

OWN_MODEL: Final = "tiered-kv check"
"""The model in the command's own namespace, for tiers whose stack's namespace is not known. It is purged afterwards."""
_FIND_S: Final = 30.0
_FIND_IN_DIRECTORY_S: Final = 10.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OperatedStack:
    """A stack's configuration, and the known facts about its namespace.

    Attributes:
        config: The configuration. Unless `is_whole`, its blocks have one byte, and its namespace is not the stack's.
        is_whole: Whether the size of blocks and the whole namespace are known.
        digest: The digest of the stack's namespace; None if unknown.
        block_bytes: Bytes of a block; None if unknown.
        source: Where the namespace comes from, for people.
        stored: Namespaces in the storage of the tiers that may be the stack's, by their digests.
        failures: By the name of a tier, why it could not be asked for its namespaces.
    """

    config: StackConfig
    is_whole: bool
    digest: str | None
    block_bytes: int | None
    source: str
    stored: Mapping[str, StoredNamespace]
    failures: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_engines(self) -> bool:
        """Whether the file leaves the size of blocks to an engine."""
        return bool(self.source) or not self.is_whole

    def __str__(self) -> str:
        if self.digest is None:
            count = f"{len(self.stored)} stored namespaces may be its own"
            return f"an engine's stack; {count if self.stored else 'nothing of it is stored'}"
        return f"namespace {self.digest}" + (f", from {self.source}" if self.source else "")

    def to_open(self) -> StackConfig:
        """Return the configuration to open tiers with.

        If only the size of blocks is known, its namespace is one that belongs to no stack: see `OWN_MODEL`.

        Raises:
            ConfigError: The size of blocks is not known, or several namespaces may be meant.
        """
        if self.is_whole:
            return self.config
        if len(self.stored) > 1 and self.digest is None:
            raise self.ambiguous()
        if self.block_bytes is None:
            raise ConfigError(
                "the engine sets the size of its blocks, and no tier has any yet; give --block-bytes, such as "
                "--block-bytes 2MiB" + "".join(f"; tier '{name}': {why}" for name, why in self.failures.items()),
                location="block.bytes",
            )
        block = {"bytes": self.block_bytes, "tokens": self.config.block.tokens}
        return own_config(_completed(self.config, self.config.namespace, block))

    def ambiguous(self) -> ConfigError:
        """Return the error if it is not known which of several namespaces is meant."""
        found = "".join(f"\n  {name} {_described(each)}" for name, each in self.stored.items())
        return ConfigError(f"the tiers store {len(self.stored)} namespaces; give --namespace DIGEST:{found}")


def add_stack_arguments(parser: argparse.ArgumentParser, *, namespace: bool = True) -> None:
    parser.add_argument("stack", metavar="STACK", help="the stack's YAML file")
    engines = parser.add_argument_group("for an engine's stack, whose file has no `block`")
    engines.add_argument("--block-bytes", metavar="SIZE", type=size, help="bytes of a block, if nothing is stored yet")
    if namespace:
        add_namespace_argument(engines)


def add_namespace_argument(parser: argparse._ActionsContainer) -> None:
    about = "which of several stored namespaces is that of an engine's stack"
    parser.add_argument("--namespace", metavar="DIGEST", type=digest, help=about)


def digest(text: str) -> str:
    if not DIGEST_HEX.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"expected 32 hexadecimal digits, as `tiered-kv inspect` shows, found {text!r}"
        )
    return text


def _is_engines(raw: Mapping[str, object]) -> bool:
    block = raw.get("block")
    return not (isinstance(block, Mapping) and "bytes" in block)


def stack_with_blocks(path: str) -> StackConfig:
    """Return the configuration in the file at `path`, for a verb that cannot ask an engine for its blocks.

    Raises:
        ConfigError: The file cannot be used, or is an engine's, without `block.bytes`.
    """
    if from_source(path, _is_engines):
        raise ConfigError(
            f"{path} leaves the size of a block to the engine; give this verb a copy with, for instance,"
            " 'block: {bytes: 2MiB, tokens: 16}' and 'namespace: {model: NAME, revision: main, dtype: bfloat16}'",
            location="block.bytes",
        )
    return load_config(path)


def operated_stack(args: argparse.Namespace, *, looks: bool = True) -> OperatedStack:
    """Return the stack of a verb's arguments; without `looks`, the storage is not searched for its namespace.

    Raises:
        ConfigError: The file cannot be used.
    """

    def read(raw: Mapping[str, object]) -> StackConfig:
        block, names = raw.get("block"), raw.get("namespace")
        if isinstance(block, Mapping) and "bytes" in block:
            return load_config(raw)
        block = {"bytes": 1, **block} if isinstance(block, Mapping) else block or {"bytes": 1}
        names = {"model": OWN_MODEL, **names} if isinstance(names, Mapping) else names or {"model": OWN_MODEL}
        return load_config({**raw, "block": block, "namespace": names})

    config = from_source(args.stack, read)
    asked, block_bytes = getattr(args, "namespace", None), getattr(args, "block_bytes", None)
    if not from_source(args.stack, _is_engines):
        ours = config.identity.digest.hex()
        _refuse_other("--block-bytes", block_bytes and format_bytes(block_bytes), format_bytes(config.block.bytes))
        _refuse_other("--namespace", asked, ours)
        return OperatedStack(config, True, ours, config.block.bytes, "", {})
    find_s = min(_FIND_S, getattr(args, "timeout", None) or _FIND_S)
    failures: dict[str, str] = {}
    stored = _fitting(config, block_bytes, find_s, failures) if looks else {}
    own: str | None = asked
    source = "--namespace"
    if own is None and len(stored) == 1:
        (own,), source = stored, "the storage of its tiers"
    if own in stored and (whole := _whole(config, stored[own])) is not None:
        return OperatedStack(whole, True, own, whole.block.bytes, source, stored)
    return OperatedStack(config, False, own, block_bytes, source if own else "", stored, failures)


def chosen_tiers(config: StackConfig, name: str | None, location: str = "--tier") -> list[TierSettings]:
    """Return the secondary tier with this name, or all; raise ConfigError if there is none.

    `location` is what named the tier.
    """
    tiers = [tier for tier in config.secondary if name in (None, tier.name)]
    if not tiers and name is not None:
        known = ", ".join(tier.name for tier in config.secondary) or "none"
        raise ConfigError(f"the stack has no secondary tier '{name}'; it has: {known}", location=location)
    return tiers


def administer(
    settings: TierSettings, work: Callable[[TierAdministration], T], time_limit: TimeLimit
) -> tuple[T | None, str | None]:
    """Return the result of `work` on a tier's administration, and an error or "". Without one, both are None."""

    def administer_it(load: Callable[[], Callable[[TierSettings], TierAdministration]]) -> T:
        with closing(load()(settings)) as administration:
            return work(administration)

    with held_log() as drop:
        try:
            load = tier_type_of(settings).administration
            if load is None:
                return None, None
            return time_limit.run(partial(administer_it, load), settings), ""
        except Exception as error:  # a third-party administration may raise anything
            drop()
            return None, tier_error_text(error, settings)


@contextmanager
def held_log() -> Iterator[Callable[[], None]]:
    """Hold log messages back until the end, and yield a function to drop them: the verb itself shows an error."""
    root, held = logging.getLogger(), MemoryHandler(1 << 30, flushLevel=1 << 30)
    before, root.handlers = root.handlers, [held]
    try:
        yield held.buffer.clear
    finally:
        root.handlers = before
        for record in held.buffer:
            root.handle(record)


def own_config(config: StackConfig) -> StackConfig:
    """Return the configuration with the namespace of `OWN_MODEL`, which is no stack's."""
    return _completed(config, Namespace(model=OWN_MODEL), config.block.model_dump())


def purge_own(config: StackConfig, tiers: Iterable[TierSettings], limit_s: float = _FIND_S) -> dict[str, str]:
    """Delete the tiers' blocks in the namespace of `OWN_MODEL`; return why some are left, by the tier's name.

    The tiers must have been shut down. Each gets `limit_s`.
    """
    namespace = own_config(config).identity.digest.hex()
    left: dict[str, str] = {}
    for settings in tiers:
        purged, error = administer(
            settings, lambda each: each.purge(namespace, time.monotonic() + limit_s), TimeLimit(limit_s)
        )
        left[settings.name] = error or "; ".join(() if purged is None else purged.left)
    return {name: what for name, what in left.items() if what}


def tier_error_text(error: BaseException, settings: TierSettings) -> str:
    """Return an error of a tier without its secrets, and without its name, which the verb shows beside it."""
    secrets = settings.secret_texts()
    return scrub(error.message, secrets) if isinstance(error, TierError) else error_text(error, secrets)


def _refuse_other(option: str, given: str | None, own: str) -> None:
    if given not in (None, own):
        raise ConfigError(f"expected {own}, since the file has 'block', found {given}; leave it out", location=option)


def namespace_differences(stack: OperatedStack, described: Mapping[str, object]) -> Mapping[str, tuple[object, object]]:
    """Return the fields in which a stored namespace differs from a stack's, with both values.

    The file of an engine's stack leaves fields open: only those are compared that it has.
    """
    if stack.is_whole:
        return differences(stack.config.identity.described, described)
    ours = stack.config.namespace.model_dump(mode="python", exclude_unset=True)
    if ours.get("model") == OWN_MODEL:
        del ours["model"]
    theirs = described.get("namespace")
    others = dict(theirs) if isinstance(theirs, Mapping) else {}
    return differences({"namespace": ours}, {"namespace": {name: others.get(name) for name in ours}})


def _fitting(
    config: StackConfig, block_bytes: int | None, find_s: float, failures: dict[str, str]
) -> dict[str, StoredNamespace]:
    """Return the stored namespaces that may be the stack's, since they have its fields.

    Among these, prefer the namespaces that all tiers with any of them store.
    """
    found: list[dict[str, StoredNamespace]] = []
    with progress("looking for the namespace", None):
        for settings in config.secondary:
            # The verb itself reports a storage that cannot be reached.
            has_directory = settings.storage_facts().directory is not None
            limit_s = min(find_s, _FIND_IN_DIRECTORY_S) if has_directory else find_s
            end_s = time.monotonic() + limit_s
            names, error = administer(settings, methodcaller("namespaces", end_s), TimeLimit(limit_s))
            if error:
                failures[settings.name] = error
            fit = {each.digest: each for each in names or () if _fits(config, block_bytes, each)}
            found += [fit] if fit else []
    common = set(found[0]).intersection(*found[1:]) if found else set()
    every = {digest: each for tier in found for digest, each in tier.items()}
    return {digest: every[digest] for digest in common or every}


def _fits(config: StackConfig, block_bytes: int | None, stored: StoredNamespace) -> bool:
    theirs = stored.described.get("namespace")
    if not isinstance(theirs, Mapping) or theirs.get("model") == OWN_MODEL:
        return False
    if block_bytes is not None and block_bytes_in(stored.described) != block_bytes:
        return False
    ours = config.namespace.model_dump(mode="python", exclude_unset=True)
    extra: Mapping[str, Any] = ours.pop("extra", {})  # Any: texts
    if ours.get("model") == OWN_MODEL:
        del ours["model"]
    others = theirs.get("extra")
    return all(theirs.get(name) == value for name, value in ours.items()) and (
        not extra or (isinstance(others, Mapping) and all(others.get(name) == text for name, text in extra.items()))
    )


def _whole(config: StackConfig, stored: StoredNamespace) -> StackConfig | None:
    """Return the configuration with a stored namespace; None if this release cannot use its readable form."""
    fields, block = stored.described.get("namespace"), stored.described.get("block")
    if not isinstance(fields, Mapping) or not isinstance(block, Mapping):
        return None
    parallel = fields.get("parallel", {"same_bytes_on_every_rank": True})
    try:
        whole = _completed(config, Namespace.model_validate({**fields, "parallel": parallel}), block)
    except (ConfigError, ValidationError):
        return None
    return whole if whole.identity.digest.hex() == stored.digest else None


def _completed(config: StackConfig, namespace: Namespace, block: Mapping[str, Any]) -> StackConfig:  # Any: sizes
    parts = {name: getattr(config, name) for name in StackConfig.model_fields if name not in ("namespace", "block")}
    return load_config({"namespace": namespace, "block": dict(block), **parts})


def _described(stored: StoredNamespace) -> str:
    names = stored.described.get("namespace")
    model, tenant = (str(names.get(each)) for each in ("model", "tenant")) if isinstance(names, Mapping) else ("?", "?")
    block_bytes = block_bytes_in(stored.described)
    return f"(model {model}, tenant {tenant}, blocks of {format_bytes(block_bytes) if block_bytes else 'unknown size'})"
