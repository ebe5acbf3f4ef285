"""Somebody has looked at each variable of the environment that an engine reads, and decided whether it counts.

A variable of a new release counts until then. `vllm_variables.txt` and `sglang_variables.txt` have those that were
looked at, but for the ignored ones, which the plugins name.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.support.engines import SGLANG, Message, printed_by

pytestmark = pytest.mark.slow

PLUGINS = Path(__file__).parents[1] / "plugins"


@functools.cache
def variables_of(engine: str, directory: Path) -> list[Message]:
    """Return what the program prints with each tested version of an engine."""
    versions = [SGLANG] if engine == "sglang" else ["0.32.0", "0.33.0"]
    program = "engine_variables_program.py"
    return [each for version in versions for each in printed_by(version, program, str(directory / version), engine)]


def looked_at(engine: str) -> list[set[str]]:
    """Return the recorded variables: those that count, and those that never do; and settings that do not."""
    paragraphs: list[set[str]] = []
    for line in (PLUGINS / engine / f"{engine}_variables.txt").read_text().splitlines():
        if line.startswith("#"):
            paragraphs.append(set())
        else:
            paragraphs[-1].update(line.split())
    return paragraphs


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("variables")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_each_variable_of_an_engine_was_looked_at(engine: str, directory: Path) -> None:
    versions = variables_of(engine, directory)
    read = {name for version in versions for name in version["read"]}
    counting = {name for version in versions for name in version["counting"]}
    ignored = {name for version in versions for name in version["ignored"]}
    count, never, *_ = looked_at(engine)
    new = read - ignored - count - never
    assert not new, (
        f"{engine} reads variables that nobody has looked at: {', '.join(sorted(new))}. Find out what each changes. If "
        f"no byte of a block depends on it, name it in plugins/tiered_kv_{engine}/ignored_settings.toml. If bytes may "
        f"depend on it, name it in tests/plugins/{engine}/{engine}_variables.txt, and see that `_VARIABLES` in "
        f"plugins/tiered_kv_{engine}/engine.py matches it"
    )
    assert counting == count, "what counts is not what the file says"
    gone = (ignored | count | never) - read
    assert not gone, f"{engine} does not read these any more; remove them: {', '.join(sorted(gone))}"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_named_settings_are_those_of_the_engine(engine: str, directory: Path) -> None:
    missing = [set(version["settings_not_there"]) for version in variables_of(engine, directory)]
    assert set.intersection(*missing) == set()


def test_each_setting_of_a_section_of_which_few_count_was_looked_at(directory: Path) -> None:
    (sglang,) = variables_of("sglang", directory)
    *_, settings = looked_at("sglang")
    assert set(sglang["other_settings"]) == settings, (
        "name new ones under `counting` if bytes may depend on them, or there"
    )
