"""`tiered-kv plugins` and `schema`: the tier types, policies and settings that a stack's file may name.

`main` calls `run` on the main thread. It loads every plugin, and opens no tier. What must stay true: a plugin or policy
that cannot be loaded is shown as broken, and the others are shown all the same.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any, Final

from tiered_kv.cli.arguments import describe_use
from tiered_kv.cli.output import Status, print_json, print_table, print_text
from tiered_kv.config.hooks import PluginState, TierType, tier_plugins
from tiered_kv.config.settings import entry_schema
from tiered_kv.config.stack_config import stack_schema
from tiered_kv.config.units import rounded_bytes, rounded_seconds
from tiered_kv.config.validation import suggestion
from tiered_kv.cpu.policies import policies
from tiered_kv.errors import ConfigError

Schema = dict[str, Any]  # Any: JSON
_ABOUT: Final = {
    "plugins": "List the tier types and eviction policies that a stack's file can name, or the settings of one type.",
    "schema": "Print the JSON schema of a stack's file, with the settings of every tier type found here. For an editor "
    "with a YAML language server, save it with `tiered-kv schema > stack.schema.json` and begin the stack's file with "
    "`# yaml-language-server: $schema=stack.schema.json`.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verb = parser.prog.split()[-1]
    parser.description = _ABOUT[verb]
    if verb == "schema":
        describe_use(parser, ("tiered-kv schema", "for an editor to complete and check stack.yaml"))
        return
    parser.add_argument("name", metavar="NAME", nargs="?", help="show the settings and metrics of this tier type")
    describe_use(
        parser,
        ("tiered-kv plugins", "the tier types and policies that were found"),
        ("tiered-kv plugins nvme", "what an entry of this type under 'secondary' can say"),
        ("tiered-kv plugins --json", "all types with all settings, for a script"),
        found="a plugin or a policy could not be loaded",
    )


def run(args: argparse.Namespace) -> Status:
    if args.verb == "plugins":
        return _plugins(args)
    print_json(stack_schema())  # the schema is JSON also without --json
    return Status.OK


def _plugins(args: argparse.Namespace) -> Status:
    states = tier_plugins().states()
    broken = [state for state in states if state.error is not None]
    found = [(state, tier) for state in states for tier in state.tiers if args.name in (None, tier.name)]
    if args.name is not None and not found:
        known = sorted(tier.name for state in states for tier in state.tiers)
        if args.name in policies().names:
            raise ConfigError(f"'{args.name}' is a policy, which has no settings; `tiered-kv plugins` describes it")
        nearest = suggestion(args.name, known)
        raise ConfigError(f"there is no tier type '{args.name}'{nearest}; there are: {', '.join(known) or 'none'}")
    found_policies = policies().found() if args.name is None else []
    broken_policies = [policy for policy in found_policies if policy.error]
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
                        "metrics": _metrics(tier),
                    }
                    for state, tier in found
                ],
                "broken": [
                    {"plugin": state.plugin, "distribution": state.distribution, "error": state.error}
                    for state in broken
                ],
                "policies": [asdict(policy) for policy in found_policies],
            }
        )
    elif args.name is not None:
        for state, tier in found:
            _show(tier, state)
    else:
        rows = [[tier.name, state.distribution or state.plugin, tier.description] for state, tier in found]
        print_table(["type", "from", "what it is"], rows, numbers=False)
        print_text("`tiered-kv plugins NAME` shows the settings of a type, also its codecs.")
        print_text(f"Policies of the primary tier: {', '.join(policies().names)}.")
        usable = [each for each in found_policies if not each.error]
        rows = [[each.name, each.distribution or "built in", each.description] for each in usable]
        print_table(["policy", "from", "what it is"], rows, numbers=False)
    errors = [(each.origin, each.error) for each in broken] + [(each.origin, each.error) for each in broken_policies]
    for origin, error in [] if args.json else errors:
        print_text(f"broken: {origin}: {error}")
    return Status.FOUND if errors else Status.OK


def _settings(tier: TierType) -> list[dict[str, object]]:
    schema = entry_schema(tier.settings)
    required = schema.get("required", [])
    return [
        {
            "name": name,
            "accepts": _accepts(field),
            "required": name in required,
            "default": field.get("default"),
            "description": field.get("description", ""),
        }
        for name, field in schema.get("properties", {}).items()
        if name != "type"
    ]


def _metrics(tier: TierType) -> list[dict[str, object]]:
    return [
        {"name": each.name, "labels": list(each.labels), "unit": each.unit, "help": each.help} for each in tier.metrics
    ]


def _accepts(field: Schema) -> str:
    """Return the types that a setting's JSON schema accepts."""
    if "anyOf" in field and "format" not in field:
        return " | ".join(_accepts(choice) for choice in field["anyOf"] if choice != {"type": "null"})
    words = [field["const"]] if "const" in field else field.get("enum")
    return " | ".join(map(str, words or [field.get("format") or field.get("type") or _other_type(field)]))


def _other_type(field: Schema) -> str:
    return "mapping" if field.keys() - {"title", "description", "default", "examples"} else "anything"


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
    if tier.metrics:
        counted = [[each.name, ", ".join(each.labels), each.help] for each in tier.metrics]
        print_table(["metric", "labels", "what it counts"], counted, numbers=False)


def _default(tier: TierType, setting: dict[str, object]) -> str:
    value = setting["default"]
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)) and setting["accepts"] in ("duration", "size"):
        return rounded_seconds(value) if setting["accepts"] == "duration" else rounded_bytes(int(value))
    return str(value)
