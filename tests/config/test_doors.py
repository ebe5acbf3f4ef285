"""The core names no plugin: what it must know of a tier, the tier's type declares, an outsider's as a built-in's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tiered_kv.config.hooks import tier_plugins

CORE = Path(__file__).parents[2] / "tiered_kv"
ORDINARY = {"memory", "host"}
"""Names of tiers that are words, too: they count only as whole texts."""
FOR_PEOPLE = "examples of the command's help"
REASONS = {
    "cli/bench.py": FOR_PEOPLE,
    "cli/check.py": FOR_PEOPLE,
    "cli/copy.py": FOR_PEOPLE,
    "cli/drain.py": FOR_PEOPLE,
    "cli/export.py": FOR_PEOPLE,
    "cli/import_file.py": FOR_PEOPLE,
    "cli/inspect.py": FOR_PEOPLE,
    "cli/places.py": FOR_PEOPLE,
    "cli/plugins.py": FOR_PEOPLE,
    "cli/replay.py": FOR_PEOPLE,
    "cli/simulate.py": FOR_PEOPLE,
    "cli/size.py": FOR_PEOPLE,
    "cli/report/page.py": "the machine's memory",
    "engines/model/sizing.py": "the tier of the stack that it proposes",
    "errors.py": "sysctl's name of a limit",
    "server/attached_counts.py": "the machine's cache, in counters",
    "stack/open.py": "a resource of the process",
    "system/file_systems.py": "a path of NFS in /sys",
    "system/limits.py": "a resource of the process, and a controller of cgroups",
    "testing/conformance.py": "a request's id",
    "tiering/base.py": "a field of TierSpec",
}
"""Files of the core that have such a text, and why."""


def texts_of(path: Path) -> Iterator[str]:
    """Yield the texts of a module that are no docstrings."""
    tree = ast.parse(path.read_text())
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


def test_the_core_names_no_tier_but_where_there_is_a_reason() -> None:
    built_in = {
        tier.name for state in tier_plugins().states() if "tiered" in state.distribution for tier in state.tiers
    }
    assert len(built_in) > len(ORDINARY)
    named = re.compile(rf"\b({'|'.join(sorted(built_in - ORDINARY))})\b")
    quoted = {f'"{name}"' for name in ORDINARY}
    found = {
        str(path.relative_to(CORE))
        for path in CORE.rglob("*.py")
        if named.search(source := path.read_text()) or any(text in source for text in quoted)  # to parse all takes long
        if any(text in ORDINARY or named.search(text) for text in texts_of(path))
    }
    assert found - REASONS.keys() == set(), "let the tier's type declare it: see `TierType` and `TierSettings`"
    assert REASONS.keys() - found == set(), "these have none any more"
