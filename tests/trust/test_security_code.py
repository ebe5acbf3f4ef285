"""Nothing in the project evaluates, unpickles or hands to a shell what it reads: the linter's rules forbid it.

The rules are in `pyproject.toml`. They find habits; they do not stop an author who hides a call.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tiered_kv.config.reading import parse_stack_text
from tiered_kv.errors import ConfigError

pytestmark = pytest.mark.trust("security")

ROOT = Path(__file__).parents[2]
PLANTED = """\
import pickle as p
from marshal import loads
from xml.etree import ElementTree
from torch import load
eval(text)
exec(text)
o.system(text)
tempfile.mktemp()
subprocess.run(text, shell=True)
yaml.load(text, yaml.Loader)
yaml.unsafe_load(text)
requests.get(url, verify=False)
ssl._create_unverified_context()
context.verify_mode = ssl.CERT_NONE
"""
IMPORTS = "import os as o\nimport ssl\nimport subprocess\nimport tempfile\n\nimport requests\nimport yaml\n\n"


def linted(*arguments: str, text: str | None = None) -> str:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise", *arguments]
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=False, timeout=120)
    assert not done.stderr.startswith("error"), done.stderr
    return done.stdout


def test_the_linter_finds_code_that_runs_data_or_verifies_no_certificate() -> None:
    said = linted("--stdin-filename", str(ROOT / "tiered_kv" / "planted.py"), "-", text=IMPORTS + PLANTED)
    found = {int(line) for line in re.findall(r"planted\.py:(\d+):\d+: (?:S|TID)\d+", said)}
    first = IMPORTS.count("\n") + 1
    assert found == set(range(first, first + PLANTED.count("\n"))), said


def test_the_project_s_code_keeps_the_rules_but_for_the_one_loader_of_yaml_and_the_forks_of_tests() -> None:
    said = linted("--ignore-noqa", "tiered_kv", "plugins", "examples", "tests/support")
    forbidden = re.findall(r"^(\S+?):\d+:\d+: (S\d+|TID251)", said, re.MULTILINE)
    forks = {(f"tests/support/{name}.py", "TID251") for name in ("forks", "syscalls")}
    assert set(forbidden) == {("tiered_kv/config/reading.py", "S506")} | forks


@pytest.mark.parametrize(
    "text",
    [
        "model: !!python/object/apply:os.system ['true']",
        "model: !!python/name:os.system",
        "a: &a [1]\nb: *a",
        "!!python/module:os {}",
    ],
)
def test_the_one_loader_makes_no_objects_and_no_copies(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_stack_text(text)
