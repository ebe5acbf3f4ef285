"""The strict pydantic models of all settings; a tier's author subclasses `TierSettings`.

`tiered_kv.config` makes them as it reads a configuration; any thread may read them, since they are frozen. What must
stay true: an unknown key is an error (not in `ClassArguments`), and no model shows a secret when it is printed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)

from tiered_kv.config.secrets import HIDDEN, redact, secrets_in, texts_in, variables_in
from tiered_kv.config.units import Bytes, BytesPerDay, Count, Seconds, format_bytes, parse_bytes
from tiered_kv.errors import ConfigError
from tiered_kv.system.limits import Take

PRIMARY_NAME: Final = "cpu"
"""The primary tier's name in counters and answers. No secondary tier may have this name."""


class StrictModel(BaseModel):
    """A frozen model that refuses unknown keys and shows no secret when it is printed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    unknown_key_advice: ClassVar[Mapping[str, str]] = {}
    """Hints for the error about an unknown key. The keys of the mapping are keys that users may expect."""

    _from_environment: Mapping[str, frozenset[str]] = PrivateAttr(default={})
    """Settings whose values came, whole or in part, from environment variables; with the values of these variables."""
    _written: Mapping[str, tuple[str, float]] = PrivateAttr(default={})
    """Sizes, rates and durations that the file has as texts: by setting, the text, and the number it stands for."""

    def secret_texts(self) -> set[str]:
        """Return every secret text in the settings, for use with `secrets.scrub`."""
        found: set[str] = set()
        for name, value in self:
            for item in _items(value):
                if isinstance(item, StrictModel):
                    found |= item.secret_texts()
                else:
                    found |= secrets_in(item, name)
                    if name in self._from_environment:
                        found |= texts_in(item) | self._from_environment[name]
        return found

    def shown(self) -> dict[str, object]:
        """Return the settings that were given, as a file has them, with `***` in place of every secret."""
        shown: dict[str, object] = {}
        for name, value in self:
            if name in self.model_fields_set:
                text, number = self._written.get(name, ("", None))
                readable = text if text and number == value else value  # a copy may have another value
                shown[name] = HIDDEN if name in self._from_environment else _shown(readable, name)
        return shown

    def __repr_args__(self) -> list[tuple[str | None, object]]:
        return [
            (name, HIDDEN if name in self._from_environment else redact(value, name or ""))
            for name, value in super().__repr_args__()
        ]

    @model_validator(mode="wrap")
    @classmethod
    def _note_texts(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate `data`, and note what validation loses: the texts of numbers, and the values of variables.

        Every value of an environment variable counts as a secret. `reading.fill_variables` puts such a value into the
        data as an `EnvironmentText`: a str that has the values of its variables. Validation makes a number, a path or a
        plain str of the text. So this is the last place that sees which settings to hide: it must note every setting
        with a variable anywhere in its value.

        A nested model is left out: it has noted its own settings. If the setting with the nested model were noted here
        too, `shown` would hide the whole nested model.
        """
        model = handler(data)
        if isinstance(data, Mapping):
            model._written = {
                name: (value, number)
                for name, value in data.items()
                if type(value) is str  # an EnvironmentText is never shown
                and isinstance(number := getattr(model, name, None), (int, float))  # None if the field has another name
            }
            model._from_environment = {
                name: variables
                for name, value in data.items()
                if (variables := variables_in(value))
                and not any(isinstance(each, StrictModel) for each in _items(getattr(model, name)))
            }
        return model


def _items(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def _shown(value: object, name: str) -> object:
    if isinstance(value, StrictModel):
        return value.shown()
    if isinstance(value, (list, tuple)):
        return [_shown(item, name) for item in value]
    return redact(value, name)


class StorageSettings(NamedTuple):
    """The names of the settings that say where a tier keeps blocks, how many bytes of them, and how long."""

    directory: str = "path"
    capacity: str = "capacity"
    ttl: str = "ttl"


@dataclass(frozen=True, slots=True)
class StorageFacts:
    """The facts about a tier's storage in the tier's settings. A fact is None if the settings do not say it."""

    directory: str | None = None
    capacity_bytes: int | None = None
    ttl_s: float | None = None

    @property
    def from_directory(self) -> str:
        """The words " from DIRECTORY" for a message about the storage; no word for a storage without a directory."""
        return "" if self.directory is None else f" from {self.directory}"


class TierSettings(StrictModel):
    """The settings that every secondary tier has. A tier's author adds fields in a subclass."""

    storage_settings: ClassVar[StorageSettings] = StorageSettings()
    """A subclass with other names of its fields gives them here, for `storage_facts` and `part_of_storage`."""

    __slots__ = ("_tier_type",)
    """The tier type that `entries.tier_type_of` found for `type`. A tier type is no setting: copies, comparisons and
    texts of the settings leave it out."""
    if TYPE_CHECKING:
        _tier_type: object

    unknown_key_advice: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("name_key", "name_key_file"),
            "Tiered KV no longer computes secret names: remove this key. Blocks under secret names are not found any "
            "more. A tier of your own can compute names: see examples/keyed_names.py",
        ),
        "limits": "the blocks of this tier belong to no tenant: the primary tier has shares, by 'limits' at the top of "
        "the file, and so have some types of tiers. Here give each tenant storage of its own: a stack with another "
        "directory, prefix, bucket or database",
    }

    type: str = Field(min_length=1, description="The tier's type, as `tiered-kv plugins` lists it.")
    name: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$",
        examples=["disk-1"],
        description="The tier's name in this stack, in counters and messages; by default its type.",
    )
    store_budget: Bytes | None = Field(
        default=None,
        ge=1,
        description="Bytes of stores in flight, which pin blocks of the primary tier; "
        "by default a quarter of its capacity. Stores over it are skipped.",
    )
    load_budget: Bytes | None = Field(
        default=None,
        ge=1,
        description="Bytes of loads in flight; by default a quarter of the primary tier's capacity.",
    )
    job_timeout: Seconds = Field(default=30.0, gt=0, le=86400, description="How long a job may take before it expires.")
    lookup_timeout: Seconds = Field(
        default=1.0, gt=0, le=3600, description="How long a lookup may go unanswered before it is a miss."
    )
    admit_after: Count = Field(
        default=1, ge=1, le=255, description="Store a block when it is offered for the n-th time."
    )
    write_budget: BytesPerDay | None = Field(
        default=None,
        ge=1,
        description="The rate at which blocks may be stored. To keep to it in any hour, those blocks are stored that "
        "are most likely to return; by default all blocks are stored.",
    )
    fill_on_promotion: bool = Field(
        default=False, description="Also store here a block that is promoted from a tier below."
    )
    required: bool = Field(
        default=True,
        description="Whether the stack opens only with this tier. If not, the stack opens without the tier while the "
        "tier cannot be opened, tries again, and takes the tier in when it answers.",
    )
    open_timeout: Seconds = Field(
        default=60.0, gt=0, le=86400, description="How long the opening of the tier may take, before it fails."
    )
    breaker_failures: Count = Field(
        default=5, ge=1, le=1_000_000, description="Failures in a row that open the tier's breaker."
    )
    breaker_cooldown: Seconds = Field(
        default=2.0, gt=0, le=86400, description="How long the breaker stays open before a probe."
    )

    def takes(self, block_bytes: int) -> tuple[Take, ...]:
        """Return what an open tier takes at most of each limit of this process, with the setting that decides it."""
        return ()

    def storage_facts(self) -> StorageFacts:
        """Return where the tier keeps blocks, how many bytes of them, and how long.

        The history, `tiered-kv simulate` and messages use it. A fact is None if its field is missing, or has another
        type.
        """
        found = {name: getattr(self, setting, None) for name, setting in self.storage_settings._asdict().items()}
        directory, capacity, ttl = found["directory"], found["capacity"], found["ttl"]
        return StorageFacts(
            os.fspath(directory) if isinstance(directory, (str, PurePath)) else None,
            capacity if isinstance(capacity, int) else None,
            float(ttl) if isinstance(ttl, (int, float)) else None,
        )

    def part_of_storage(self, directory: str, share: Fraction) -> Self:
        """Return these settings for a part of a storage that is not shared: a directory of its own, and less capacity.

        Args:
            directory: A name for a directory below the tier's own. A tier without a directory ignores it.
            share: The part of the capacity; more than 0 and at most 1.

        Raises:
            ConfigError: The capacity cannot be divided.
        """
        names, facts = self.storage_settings, self.storage_facts()
        update: dict[str, object] = {}
        if facts.directory is not None:
            own = getattr(self, names.directory)
            update[names.directory] = own / directory if isinstance(own, PurePath) else f"{own}/{directory}"
        if facts.capacity_bytes is not None:
            update[names.capacity] = int(facts.capacity_bytes * share)
        elif share < 1 and (text := getattr(self, names.capacity, None)) is not None:  # an argument of a tier's class
            try:
                update[names.capacity] = format_bytes(int(parse_bytes(text) * share))
            except (TypeError, ValueError):
                raise ConfigError(
                    f"tier '{self.name}': expected a size, since several kinds of blocks divide it; found "
                    f"{redact(text, names.capacity)!r}",
                    location=names.capacity,
                ) from None
        return self.model_copy(update=update)

    @model_validator(mode="after")
    def _has_one_admission(self) -> Self:
        if self.admit_after > 1 and self.write_budget is not None:
            raise ValueError("'admit_after' and 'write_budget' both decide what is stored; give one of them")
        return self

    @model_validator(mode="before")
    @classmethod
    def _name_after_type(cls, data: object) -> object:
        if not isinstance(data, Mapping) or data.get("name"):
            return data
        tier_type = data.get("type", cls.model_fields["type"].default)
        return {**data, "name": tier_type.rpartition(":")[2]} if isinstance(tier_type, str) else data


class ClassArguments(TierSettings):
    """The settings of a tier without a model: its class gets every other key as an argument."""

    model_config = ConfigDict(extra="allow")

    @property
    def arguments(self) -> dict[str, object]:
        return dict(self.model_extra or {})


def entry_schema(settings: type[TierSettings], ref_template: str = "#/$defs/{model}") -> dict[str, Any]:  # Any: JSON
    """Return the JSON schema of a tier's entry. A field accepts anything if JSON has no such type."""
    from pydantic.json_schema import GenerateJsonSchema  # only the command needs it

    class OfAnyType(GenerateJsonSchema):
        ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  # as its base has it

        def handle_invalid_for_json_schema(self, schema: object, error_info: str) -> dict[str, Any]:
            return {}

    return settings.model_json_schema(ref_template=ref_template, schema_generator=OfAnyType)
