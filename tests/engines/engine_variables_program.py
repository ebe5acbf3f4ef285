"""Runs in an environment with vLLM or SGLang: which variables of the environment that engine reads.

    python engine_variables_program.py DIRECTORY vllm|sglang

Prints a line of JSON: the names that the engine registers, or reads directly; which of them count for our integration;
which names it ignores; which settings it names that the engine does not have; and of sections of which it
names those that count, the other settings.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

os.environ.update(SGLANG_USE_CPU_ENGINE="1", VLLM_LOGGING_LEVEL="ERROR")

from tiered_kv.engines.facts import counting_variables
from tiered_kv.engines.ignored import ignored_settings

READS = re.compile(
    r"""(?:getenv|environ(?:\.get|\.setdefault|\.pop)?|\b(?:get_)?\w*env\w*)\s*[\(\[]\s*["']([A-Z][A-Z0-9_]+)["']|"""
    r"""["']([A-Z][A-Z0-9_]+)["']\s+(?:not\s+)?in\s+os\.environ"""
)
"""A name where a program reads a variable: by `os`, or by a function or class with "env" in its name."""
NOT_SERVING = {"benchmark", "benchmarks", "multimodal_gen", "test", "lang"}
"""Folders of an engine that serve no language model."""


def read_directly(package: Path) -> set[str]:
    files = (path for path in package.rglob("*.py") if NOT_SERVING.isdisjoint(path.relative_to(package).parts))
    found = (READS.findall(path.read_text(errors="replace")) for path in files)
    return {name for names in found for pair in names for name in pair if name}


def of_vllm(sections: Iterable[str]) -> tuple[set[str], Mapping[str, set[str]]]:
    """Return the registered variables, and the fields of each section of settings."""
    from vllm import config, envs

    classes = {name.lower(): getattr(config, name) for name in config.__all__}
    fields = {
        section: {each.name for each in dataclasses.fields(classes[section.replace("_", "")])} for section in sections
    }
    return set(envs.environment_variables), fields


def of_sglang(_: Iterable[str]) -> tuple[set[str], Mapping[str, set[str]]]:
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.environ import EnvField, Envs
    from sglang.srt.server_args import ServerArgs

    fields: dict[str, set[str]] = {}
    for name, path in namespace_of(ServerArgs).items():
        fields.setdefault(path.partition(".")[0], set()).add(name)
    return {name for name, field in vars(Envs).items() if isinstance(field, EnvField)}, fields


def main() -> None:
    _, name = sys.argv[1:]
    engine = importlib.import_module(f"tiered_kv_{name}.engine")
    ignored = ignored_settings(Path(str(engine.__file__)).parent)
    package = Path(str(importlib.import_module(name).__file__)).parent
    settings, few = ignored.settings, ignored.counting
    registered, fields = {"vllm": of_vllm, "sglang": of_sglang}[name](settings)
    read = registered | read_directly(package)
    print(
        json.dumps(
            {
                "read": sorted(read),
                "counting": sorted(counting_variables(engine._VARIABLES, ignored.variables, dict.fromkeys(read, "1"))),
                "ignored": sorted(ignored.variables),
                "settings_not_there": sorted(
                    f"{section}.{each}"
                    for section, names in [*settings.items(), *few.items()]
                    for each in names - fields[section]
                ),
                "other_settings": sorted(
                    f"{section}.{each}" for section, names in few.items() for each in fields[section] - names
                ),
            }
        )
    )


if __name__ == "__main__":
    main()
