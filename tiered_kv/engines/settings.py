"""The shared part of all engines' configurations: the tiers, and the user's part of a namespace.

The plugins of engines subclass the settings, and read them on the thread that opens the tiers. What must stay true:
nothing in a user's `extra` replaces a fact that the engine reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, SerializeAsAny, field_validator

from tiered_kv.config.entries import check_entries
from tiered_kv.config.namespace import Label, Namespace
from tiered_kv.config.settings import StrictModel, TierSettings
from tiered_kv.config.validation import validate
from tiered_kv.engines.facts import bidirectional_setting
from tiered_kv.errors import ConfigError


class CallerSettings(StrictModel):
    """The base of the settings of tiers over an engine's own memory."""

    location: ClassVar[str]  # where they are in the engine's configuration, for messages

    tiers: tuple[SerializeAsAny[TierSettings], ...] = Field(
        min_length=1, max_length=64, description="The tiers, as in a stack's `secondary`, in the order of the search."
    )

    @field_validator("tiers", mode="before")
    @classmethod
    def _entries_by_their_types(cls, entries: object) -> object:
        return check_entries(entries, (cls.location, "tiers"), {})


class UserNamespace(StrictModel):
    """The fields that a user may set for every engine; each integration adds its own."""

    revision: Label | None = Field(default=None, description="The revision of the model's weights.")
    quantization: Label | None = Field(default=None, description="How keys and values are quantized.")
    tenant: Label | None = Field(default=None, description="Keeps one user's blocks from another's.")
    extra: dict[Label, str] = Field(
        default={}, max_length=256, description="Whatever else must agree, such as the state of adapters."
    )

    def complete(
        self, engine: str, fields: Mapping[str, object], facts: Mapping[str, str], location: tuple[str, ...]
    ) -> Namespace:
        """Return the namespace of an engine's `fields`, in which the user's fields replace the engine's.

        Its `extra` has the user's entries and the engine's `facts`. `location` is the path of this mapping in the
        configuration. Raises `ConfigError`: an entry of the user has the name of a fact, or a value is wrong.
        """
        taken = sorted(self.extra.keys() & facts.keys())
        if taken:
            raise ConfigError(
                f"{engine} sets '{taken[0]}'; choose another name", location=".".join((*location, "extra"))
            )
        own = self.model_dump(exclude_none=True, exclude={"extra"})
        namespace = validate(Namespace, {**fields, **own, "extra": {**self.extra, **facts}}, location)
        namespace._from_environment = self._from_environment  # `own` has plain copies of its values
        return namespace


class UserModelNamespace(UserNamespace):
    """The fields for engines that report which model they run."""

    model: Label | None = Field(default=None, description="The model's name; by default its path.")

    def check_adapters(self, engine: str, location: str) -> None:
        """Raise ConfigError if `extra` does not name the state of the adapters of an engine that has some."""
        if not self.extra.get("adapters"):
            raise ConfigError(
                f"LoRA is on. {engine}'s hashes hold an adapter's name and path and nothing of its weights; name their "
                'state here, such as "extra": {"adapters": "1"}, and change it whenever you replace weights under one '
                "path",
                location=location,
            )

    def check_attention(self, engine: str, described: Mapping[str, object], location: str) -> None:
        """Raise ConfigError if a text model's tokens attend to later tokens.

        `described` is what `to_dict` of the model's configuration returns.
        The hashes of a block hold the tokens up to its end. For images, attention in both directions does no harm: the
        hashes of all their blocks hold the whole image.
        """
        setting = bidirectional_setting(described)
        if setting:
            raise ConfigError(
                f"the model's configuration has {setting}: its keys depend on later tokens, which {engine}'s hashes of "
                "a block do not hold; start this model without Tiered KV",
                location=location,
            )

    def named_weights(self, engine: str, model: str, load_format: str, location: str) -> str:
        """Return the description of weights for a namespace, where the engine cannot tell which weights it loads.

        Raises `ConfigError`: the user's `revision`, which has to name the weights, is missing.
        """
        if self.revision is None:
            raise ConfigError(
                f"{engine} does not report which weights '{model}' has (load format {load_format}); name them by "
                '"revision" here',
                location=location,
            )
        return f"revision, {load_format}"
