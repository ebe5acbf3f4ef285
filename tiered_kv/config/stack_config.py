"""The configuration of a stack: from a YAML file or a mapping to a `StackConfig`, and its JSON schema.

`open_stack`, the commands and the engines' plugins read it, on the thread that opens. An error names the key, the found
value and the remedy, with the line of the file. Reading opens no tier.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, ValidationInfo, WithJsonSchema, field_validator, model_validator

from tiered_kv.config.entries import check_entries
from tiered_kv.config.files import RecordSettings, WarmSettings
from tiered_kv.config.hooks import REFERENCE, TierType, tier_plugins
from tiered_kv.config.limits import Limits
from tiered_kv.config.namespace import Namespace, NamespaceIdentity
from tiered_kv.config.reading import fill_variables, from_source
from tiered_kv.config.secrets import Token
from tiered_kv.config.settings import PRIMARY_NAME, ClassArguments, StrictModel, TierSettings, entry_schema
from tiered_kv.config.units import HOURS_A_DAY, Bytes, Count, Seconds, Share, format_bytes
from tiered_kv.config.validation import suggestion, validate
from tiered_kv.cpu.policies import BUILT_IN_POLICIES, policies
from tiered_kv.errors import ConfigError
from tiered_kv.hints import HINT_NAMES, HintName

PRIMARY_BLOCKS_MIN = 2
PORT_MAX = 65535
_ADDRESS = r"^(tcp://(\[[0-9A-Fa-f:]+\]|[^\s/:\[\]]+):(\*|[0-9]{1,5})|ipc://\S+)$"
_ADDRESSES = ["tcp://127.0.0.1:5557", "ipc:///run/kv-events"]
TOPICS_MAX = 64
Topic = Annotated[str, Field(max_length=256)]
_TOPIC_SCHEMA: dict[str, Any] = {"type": "string", "maxLength": 256}
_TOPICS_SCHEMA: dict[str, Any] = {
    "anyOf": [_TOPIC_SCHEMA, {"type": "array", "items": _TOPIC_SCHEMA, "minItems": 1, "maxItems": TOPICS_MAX}]
}
_RATE_MAX = 1 << 40
_OFF_SCHEMA: dict[str, Any] = {"enum": ["off", False]}
"""YAML 1.2 reads the word `off` as a text, YAML 1.1 as False."""
_RATE_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "maximum": _RATE_MAX},
        {"const": "measured"},
        _OFF_SCHEMA,
        {"type": "string", "pattern": r"^0*[1-9][0-9]*$|\$\{"},  # a variable of the environment may give the number
    ]
}


class BlockSettings(StrictModel):
    """The size of a block of one KV cache group."""

    bytes: Bytes = Field(ge=1, le=1 << 30, description="Bytes of a block.")
    tokens: Count = Field(default=16, ge=1, le=1 << 20, description="Tokens that a block holds.")


class PrimarySettings(StrictModel):
    """The primary tier: one region of CPU memory."""

    capacity: Bytes = Field(description="Size of the region; rounded down to whole blocks.")
    policy: str = Field(
        default="lru",
        description=f"The eviction policy: {', '.join(BUILT_IN_POLICIES)}, another that was found, or module:Class.",
    )
    shared: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}$",
        examples=["my_engine-1"],
        description="Name of the file in /dev/shm that the processes of an engine map, where the engine gives none.",
    )
    huge_pages: Annotated[Literal["auto", "off"], WithJsonSchema({"enum": ["auto", True, "off", False]})] = Field(
        default="auto", description="Have the memory on huge pages as far as the kernel gives them; 'off' for none."
    )
    reserved_huge_pages: bool | None = Field(
        default=None,
        description="Of `tiered-kv serve`: use reserved huge pages (vm.nr_hugepages); by default if they suffice.",
    )
    prefault: bool | None = Field(
        default=None,
        description="Allocate every page when the stack is opened; by default only `tiered-kv serve` does, behind it.",
    )
    numa_node: Count | None = Field(default=None, ge=0, description="Bind the memory to this NUMA node.")
    promotion_budget: Bytes | None = Field(
        default=None,
        description="Memory that blocks on their way from secondary tiers may take; by default half of the region.",
    )
    prefetch_budget: Bytes | None = Field(
        default=None, description="Part of promotion_budget that prefetch orders may take; by default a quarter of it."
    )
    promotion_hold: Seconds = Field(
        default=10.0, gt=0, le=3600, description="How long a promoted block waits for its request."
    )
    request_wait: Seconds = Field(
        default=30.0, gt=0, le=3600, description="How long a request may wait for blocks; then they are a miss for it."
    )

    @property
    def wants_huge_pages(self) -> bool:
        return self.huge_pages == "auto"

    def refuse_without_server(self) -> None:
        """Raise `ConfigError` for a setting that only the server of a host's cache knows."""
        if self.reserved_huge_pages:
            message = "only `tiered-kv serve` uses reserved huge pages; leave it out"
            raise ConfigError(message, location="primary.reserved_huge_pages")

    @field_validator("huge_pages", mode="before")
    @classmethod
    def _off_may_be_false(cls, huge_pages: object) -> object:
        """Read true and false, and the word `off`, which YAML turns into False."""
        return {"true": "auto", "false": "off"}.get(str(huge_pages).lower(), huge_pages)

    @field_validator("policy")
    @classmethod
    def _policy_has_a_name(cls, policy: str) -> str:
        if policy not in BUILT_IN_POLICIES and not REFERENCE.fullmatch(policy) and policy not in policies().names:
            nearest = suggestion(policy, policies().names)
            raise ValueError(f"expected {', '.join(policies().names)}, or 'module:Class' of a policy{nearest}")
        return policy


class MetricsSettings(StrictModel):
    """The HTTP server of a stack's metrics and status."""

    listen: str = Field(
        default="127.0.0.1:9464",
        pattern=r"^([A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}$",
        examples=["127.0.0.1:9464", "[::1]:9464"],
        description="Address and port, such as 127.0.0.1:9464 or [::1]:9464; port 0 takes any that is free.",
    )

    token: Token | None = Field(
        default=None,
        description="What callers of `/prefetch` and `/limits` must send; without it only loopback may.",
    )

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)

    @field_validator("listen")
    @classmethod
    def _port_is_one(cls, listen: str) -> str:
        if int(listen.rpartition(":")[2]) > PORT_MAX:
            raise ValueError(f"expected a port from 0 to {PORT_MAX}")
        return listen


class EventSettings(StrictModel):
    """Where events of all tiers are published. Other machines can connect unless the address is a loopback one."""

    publish: str = Field(
        pattern=_ADDRESS,
        examples=_ADDRESSES,
        description="Address to listen at for subscribers, such as tcp://127.0.0.1:5557.",
    )
    replay: str | None = Field(
        default=None,
        pattern=_ADDRESS,
        examples=_ADDRESSES,
        description="Address to listen at for subscribers that missed events; by default there is none.",
    )
    topic: Annotated[tuple[Topic, ...], WithJsonSchema(_TOPICS_SCHEMA)] = Field(
        default=("kv",),
        description="The first frame of each message; of several topics, each message is sent with each.",
    )

    requests: Topic | None = Field(
        default=None, description="The topic of messages about each ended request, and what it got; by default none."
    )

    @field_validator("topic", mode="before")
    @classmethod
    def _one_is_a_list_of_one(cls, topic: object) -> object:
        if isinstance(topic, (list, tuple)) and not 1 <= len(topic) <= TOPICS_MAX:
            raise ValueError(f"expected from 1 to {TOPICS_MAX} topics")
        return (topic,) if isinstance(topic, str) else topic

    recording: Topic | None = Field(
        default=None,
        description="The topic of messages with the blocks of each request, for tiered-kv record; by default none.",
    )

    @field_validator("requests", "recording")
    @classmethod
    def _no_subscriber_of_blocks_gets_requests(cls, requests: str | None, info: ValidationInfo) -> str | None:
        topics = info.data.get("topic", ())
        if requests is not None and requests.startswith(topics):
            raise ValueError(f"expected a topic that begins with none of {', '.join(map(repr, topics))}")
        return requests


class PrefillSettings(StrictModel):
    """How fast the engine computes prompts: a block that it computes sooner than a tier loads it is not promoted."""

    tokens_per_s: Annotated[Count | Literal["measured", "off"], WithJsonSchema(_RATE_SCHEMA)] = Field(
        description="Tokens of prompts that the engine computes in a second; 'measured' in vLLM, whose steps are "
        "timed; 'off' to promote a block however long that takes."
    )

    @field_validator("tokens_per_s", mode="before")
    @classmethod
    def _is_a_rate(cls, rate: object) -> object:
        is_number = not isinstance(rate, bool) and str(rate).isdecimal()
        if rate is False:  # YAML reads the word `off` so
            return "off"
        if rate in ("measured", "off") or (is_number and 1 <= int(str(rate)) <= _RATE_MAX):
            return rate
        raise ValueError("expected a whole number from 1, 'off', or 'measured' in vLLM")


class StackConfig(StrictModel):
    """A whole stack. `load_config` makes one from a file or a mapping; a program may make one itself."""

    version: Literal[1] = Field(default=1, description="Version of this form.")
    namespace: Namespace = Field(description="What must agree for blocks to be interchangeable.")
    block: BlockSettings = Field(description="The size of a block.")
    primary: PrimarySettings = Field(description="The primary tier.")
    secondary: tuple[SerializeAsAny[TierSettings], ...] = Field(
        default=(), max_length=64, description="The tiers behind it, in the order they are searched."
    )
    limits: Limits | None = Field(
        default=None, description="The tenants' shares of the primary tier, such as 25%; 'default' is for all others."
    )
    prefill: PrefillSettings | None = Field(
        default=None, description="What computing costs; left out, it is measured in vLLM, and off elsewhere."
    )
    hints: tuple[HintName, ...] = Field(
        default=HINT_NAMES, max_length=len(HINT_NAMES), description="The hints of requests that count; [] for none."
    )
    audit: Share = Field(
        default=0.0,
        description="Share of requests whose blocks the engine computes anew, to compare what the tiers have of them.",
    )
    audit_tolerance: Share = Field(
        default=0.1, description="The largest relative difference of 256 values that computing anew may bring."
    )
    audit_action: Literal["report", "stop"] = Field(
        default="report", description="What to do about a tier whose block differs by more: report it, or stop its use."
    )
    metrics: MetricsSettings | None = Field(
        default=None, description="Serve metrics and status over HTTP, to read only; left out, nothing listens."
    )
    history: Count = Field(
        default=1 << 20,
        ge=0,
        le=1 << 30,
        description="Entries of the memory that says why a block was a miss, 8 bytes each; 0 for none.",
    )
    events: EventSettings | None = Field(
        default=None, description="Where events of stored and removed blocks are published; by default nowhere."
    )
    record: RecordSettings | None = Field(
        default=None, description="Record which blocks requests ask for, as a trace for simulate; a path, or settings."
    )
    warm: WarmSettings | None = Field(
        default=None, description="Keep the list of the memory's hottest blocks over a restart; a path, or settings."
    )

    @property
    def primary_blocks(self) -> int:
        """How many blocks the primary tier holds."""
        return self.primary.capacity // self.block.bytes

    @property
    def compute_block_s(self) -> float:
        """Seconds in which the engine computes a block; infinite if the file gives no number."""
        rate = "off" if self.prefill is None else self.prefill.tokens_per_s
        return math.inf if isinstance(rate, str) else self.block.tokens / rate

    @property
    def is_prefill_measured(self) -> bool:
        """Whether an engine that can measure its prefill rate must do so."""
        return self.prefill is None or self.must_measure_prefill

    @property
    def must_measure_prefill(self) -> bool:
        """Whether the file asks for a measured prefill rate."""
        return self.prefill is not None and self.prefill.tokens_per_s == "measured"

    @property
    def identity(self) -> NamespaceIdentity:
        """The identity of the namespace with this block size."""
        return self.namespace.identify(block_bytes=self.block.bytes, block_tokens=self.block.tokens)

    @field_validator("prefill", mode="before")
    @classmethod
    def _off_is_a_word(cls, prefill: object) -> object:
        """Read `prefill: off`, which YAML turns into False, as `tokens_per_s: off`."""
        return {"tokens_per_s": "off"} if prefill is False or prefill == "off" else prefill

    @field_validator("record", "warm", mode="before")
    @classmethod
    def _a_path_is_enough(cls, given: object) -> object:
        return {"path": given} if isinstance(given, str) else given

    @field_validator("secondary", mode="before")
    @classmethod
    def _entries_by_their_types(cls, entries: object) -> object:
        return () if entries is None else check_entries(entries, ("secondary",), {PRIMARY_NAME: "the primary tier"})

    @model_validator(mode="after")
    def _requests_have_a_history(self) -> StackConfig:
        if self.events is not None and self.events.requests is not None and not self.history:
            message = "what requests got is counted in the history: expected a 'history' above 0"
            raise ConfigError(message, location="events.requests")
        return self

    @model_validator(mode="after")
    def _sizes_hold_blocks(self) -> StackConfig:
        sizes: list[tuple[str, int | None, int]] = [
            ("primary.capacity", self.primary.capacity, PRIMARY_BLOCKS_MIN),
            ("primary.promotion_budget", self.primary.promotion_budget, 1),
            ("primary.prefetch_budget", self.primary.prefetch_budget, 1),
        ]
        for index, tier in enumerate(self.secondary):
            sizes.append((f"secondary.{index}.store_budget", tier.store_budget, 1))
            sizes.append((f"secondary.{index}.load_budget", tier.load_budget, 1))
            sizes.append((f"secondary.{index}.write_budget", tier.write_budget, HOURS_A_DAY))
        block_bytes = self.block.bytes
        for location, size_bytes, blocks in sizes:
            if size_bytes is not None and size_bytes < blocks * block_bytes:
                raise ConfigError(
                    f"expected room for at least {blocks} {'block' if blocks == 1 else 'blocks'} of "
                    f"{format_bytes(block_bytes)}, that is {format_bytes(blocks * block_bytes)}, "
                    f"found {format_bytes(size_bytes)}",
                    location=location,
                )
        return self


def load_config(
    source: str | os.PathLike[str] | Mapping[str, object] | StackConfig,
    *,
    environ: Mapping[str, str] | None = None,
) -> StackConfig:
    """Return the configuration of a stack; every error names the setting, and never a secret.

    Args:
        source: The path of a YAML file; a mapping of the same form; or a configuration, returned as it is.
        environ: Values of `${NAME}`; by default the process's environment.

    Raises:
        ConfigError: It cannot be used. The message has a line for each setting at fault.
    """
    if isinstance(source, StackConfig):
        return source
    variables = os.environ if environ is None else environ
    return from_source(source, lambda raw: validate(StackConfig, fill_variables(raw, variables)))


Schema = dict[str, Any]  # Any: JSON


def stack_schema() -> Schema:
    """Return the JSON schema of a stack's file, with every installed tier type."""
    schema = StackConfig.model_json_schema()
    definitions: Schema = schema.setdefault("$defs", {})
    definitions.pop("TierSettings", None)
    entries: list[Schema] = [
        _entry_schema(tier_type, definitions) for tier_type in tier_plugins().tier_types().values()
    ]
    entries.append(
        {
            "type": "object",
            "description": "A tier by its class.",
            "properties": {"type": {"type": "string", "pattern": "^[^:]+:[^:]+$"}},
            "required": ["type"],
        }
    )
    schema["properties"]["secondary"]["items"] = {"oneOf": entries}
    schema["properties"]["prefill"]["anyOf"].append(_OFF_SCHEMA)
    for name in ("record", "warm"):
        schema["properties"][name]["anyOf"].append({"type": "string", "minLength": 1})
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "tiered-kv stack"
    return schema


def _entry_schema(tier_type: TierType, definitions: Schema) -> Schema:
    """Add the schema of one tier type's entry to `definitions`; return a reference to it."""
    prefix = f"tier-{tier_type.name}"
    entry = entry_schema(tier_type.settings, f"#/$defs/{prefix}-{{model}}")
    for name, definition in entry.pop("$defs", {}).items():
        definitions[f"{prefix}-{name}"] = definition
    entry["title"] = tier_type.name
    if tier_type.description:
        entry["description"] = tier_type.description
    if issubclass(tier_type.settings, ClassArguments):
        entry["description"] = f"{tier_type.description} Further keys are arguments of its class.".strip()
    entry["properties"]["type"] = {"const": tier_type.name}
    entry["required"] = sorted({"type", *entry.get("required", ())})
    definitions[prefix] = entry
    return {"$ref": f"#/$defs/{prefix}"}
