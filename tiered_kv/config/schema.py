"""The JSON schema of a stack's file, for editors."""

from __future__ import annotations

from typing import Any

from tiered_kv.config.settings import ClassArguments
from tiered_kv.config.stack_config import StackConfig
from tiered_kv.hooks import TierType, tier_plugins

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]  # Any: JSON


def stack_schema() -> Schema:
    """Return the JSON schema of a stack's file with every tier type that is installed here."""
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
    schema["$schema"] = DIALECT
    schema["title"] = "tiered-kv stack"
    return schema


def _entry_schema(tier_type: TierType, definitions: Schema) -> Schema:
    """Add the schema of one tier type's entry to `definitions`, its own definitions included, and refer to it."""
    prefix = f"tier-{tier_type.name}"
    entry = tier_type.settings.model_json_schema(ref_template=f"#/$defs/{prefix}-{{model}}")
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
