"""`tiered-kv plugins`: the tier types that were found, with their settings, and the plugins that are broken."""

from __future__ import annotations

import argparse
from typing import Any

from tiered_kv._cli.arguments import describe_use
from tiered_kv._cli.output import Status, print_json, print_table, print_text
from tiered_kv.config.units import formatted_setting
from tiered_kv.hooks import PluginState, TierType, tier_plugins

Schema = dict[str, Any]  # Any: JSON


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "List every tier type that a stack's file can name, and the settings of its entry."
    describe_use(
        parser,
        ("tiered-kv plugins", "what a stack's file can say under 'secondary'"),
        ("tiered-kv plugins --json", "for a script"),
        found="a plugin could not be loaded",
    )


def run(args: argparse.Namespace) -> Status:
    states = tier_plugins().states()
    broken = [state for state in states if state.error]
    if args.json:
        print_json(
            {
                "tiers": [
                    {
                        "name": tier.name,
                        "description": tier.description,
                        "plugin": state.plugin,
                        "distribution": state.distribution,
                        "settings": _settings(tier),
                    }
                    for state in states
                    for tier in state.tiers
                ],
                "broken": [
                    {"plugin": state.plugin, "distribution": state.distribution, "error": state.error}
                    for state in broken
                ],
            }
        )
    else:
        for state in states:
            for tier in state.tiers:
                _show(tier, state)
        for state in broken:
            print_text(f"broken: {state.origin}: {state.error}")
    return Status.FOUND if broken else Status.OK


def _settings(tier: TierType) -> list[dict[str, object]]:
    schema = tier.settings.model_json_schema()
    required = schema.get("required", [])
    return [
        {
            "name": name,
            "accepts": _accepts(field),
            "required": name in required,
            "default": field.get("default"),
            "description": tier.settings.model_fields[name].description or "",
        }
        for name, field in schema.get("properties", {}).items()
        if name != "type"
    ]


def _accepts(field: Schema) -> str:
    """Return the types that a setting's JSON schema accepts."""
    if "anyOf" in field and "format" not in field:
        return " | ".join(_accepts(choice) for choice in field["anyOf"] if choice != {"type": "null"})
    words = [field["const"]] if "const" in field else field.get("enum")
    return " | ".join(map(str, words or [field.get("format") or field.get("type", "mapping")]))


def _show(tier: TierType, state: PluginState) -> None:
    rows = [
        [
            str(setting["name"]),
            str(setting["accepts"]),
            "required" if setting["required"] else _default(tier, setting),
            str(setting["description"]),
        ]
        for setting in _settings(tier)
    ]
    about = f": {tier.description}" if tier.description else ""
    title = f"{tier.name}{about} ({state.origin})"
    print_table(["setting", "accepts", "default", "what it is for"], rows, title=title, numbers=False)


def _default(tier: TierType, setting: dict[str, object]) -> str:
    value = setting["default"]
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return str(formatted_setting(value, tier.settings.model_fields[str(setting["name"])]))
