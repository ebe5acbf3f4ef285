"""What somebody meets who has a clone and nothing else: the README's commands, the ways to install, the site."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CI = (ROOT / ".ci" / "run").read_text()
TASKS = (ROOT / "noxfile.py").read_text()
EXAMPLES = ROOT / "examples"
TEXTS = sorted(
    path
    for top in ("README.md", "docs", "examples", "plugins", "tiered_kv", ".ci", ".github")
    for path in ([ROOT / top] if (ROOT / top).is_file() else (ROOT / top).rglob("*"))
    if path.is_file() and path.suffix not in {".pyc", ".svg", ".png"}
)
INSTALLS = re.compile(
    r"\b(?:pip3?|pipx|uv add|uv tool)\b[^\n`]*?\b(?:install|add|run)\b([^\n`]*)|^\s*(tiered-kv\S*)\s*$"
)
BY_NAME = re.compile(r"""(?<![\w./@-])tiered[-_]kv[\w-]*(?:\[[^\]]*\])?(?!["']?[\w./\[-]|["']?\s*@)""")
"""The distribution, or another of a name that begins so, without a path before it and without a place behind it."""
LIBRARIES = {
    "redis": "redis",
    "s3": "boto3",
    "gcs": "obstore",
    "azure": "obstore",
    "fs": "aiofiles",
    "events": "zmq",
    "metrics": "prometheus_client",
}


def lines_of_blocks(page: str) -> list[str]:
    return [line for block in re.findall(r"```(?:sh|bash)\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]


def test_two_commands_of_the_readme_do_all_the_set_up() -> None:
    environments = [line for line in lines_of_blocks(README) if line.startswith("python3 -m venv .venv && ")]
    job, tests = (line.split(" && ") for line in environments)
    assert job[1:] == [".venv/bin/pip install .", ".venv/bin/tiered-kv replay examples/quickstart.yaml"]
    assert tests[1] == ".venv/bin/pip install -c tests/constraints.txt -e '.[test]'"
    assert tests[2].startswith(".venv/bin/pytest ")
    assert tests[2].endswith(" -m 'not slow'")
    assert len(job) == len(tests) == 3


def test_the_task_of_the_quick_tests_takes_their_command_from_the_readme() -> None:
    (pattern,) = re.findall(r'command = re\.findall\("([^"]+)"', TASKS)
    (command,) = re.findall(pattern, README, re.MULTILINE)
    assert command in lines_of_blocks(README)
    assert '"bash", "-c", command[0]' in TASKS
    assert command not in TASKS + CI, "a copy would stay as it is when the README changes"


def test_continuous_integration_runs_every_task() -> None:
    tasks = set(re.findall(r"^@nox\.session.*\ndef (\w+)", TASKS, re.MULTILINE))
    (two_at_a_time,) = re.findall(r"printf '%s\\n' ([a-z_ ]+) \|\n *xargs -P 2 ", CI)
    assert {"install", *two_at_a_time.split(), "figures"} == tasks - {"newest"}, "it changes the checkout: each week"


PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_place_names_the_same_pythons() -> None:
    (found,) = re.findall(r"^PYTHONS = \((.*)\)$", TASKS, re.MULTILINE)
    pythons = sorted(re.findall(r'"3\.(\d+)"', found), key=int)
    oldest, newest = f"3.{pythons[0]}", f"3.{pythons[-1]}"
    named = re.findall(r"Python :: 3\.(\d+)$", "\n".join(PYPROJECT["classifiers"]), re.MULTILINE)
    assert named == pythons
    assert PYPROJECT["requires-python"] == f">={oldest}"
    for page in (README, (ROOT / "docs" / "reference" / "versions.md").read_text()):
        assert f"Python {oldest} to {newest}" in page
    checks = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text())["jobs"]
    assert checks["tests"]["strategy"]["matrix"]["python"] == [oldest, newest]


def test_the_constraints_pin_all_that_tests_and_docs_ask_for() -> None:
    pins: dict[str, list[str]] = {}
    for line in (ROOT / "tests" / "constraints.txt").read_text().splitlines():
        name, version = line.partition(";")[0].strip().split("==")
        pins.setdefault(canonicalize_name(name), []).append(version)
    extras = PYPROJECT["optional-dependencies"]
    for wanted in map(Requirement, (*PYPROJECT["dependencies"], *extras["test"], *extras["docs"])):
        versions = pins[canonicalize_name(wanted.name)]
        assert all(wanted.specifier.contains(version) for version in versions), wanted


def commands_that_install_by_name(text: str) -> Iterator[str]:
    for line in text.splitlines():
        for found in INSTALLS.finditer(line):
            if BY_NAME.search(found[1] or found[2]):
                yield line.strip()


@pytest.mark.parametrize(
    ("line", "is_by_name"),
    [
        ("pip install 'tiered-kv[redis,s3]'", True),
        ("Run `python -m pip install -U tiered_kv`.", True),
        ("uv pip install vllm tiered-kv", True),
        ("RUN pip3 install --no-cache-dir tiered-kv[redis]", True),
        ("pip install --find-links dist 'tiered-kv[redis]'", True),
        ("pipx install tiered-kv", True),
        ("    tiered-kv[redis]", True),
        ("pip install '.[redis,s3]' into tiered-kv's", False),
        ("pip install '../tiered-kv[redis]'", False),
        ('pip install "tiered-kv[redis] @ file://$wheel"', False),
        ("/opt/tiered-kv/bin/pip install '.[redis]'", False),
        ("pip install dist/tiered_kv-0.1.0-py3-none-any.whl", False),
        ("pip install . ./examples/plugin_sqlite", False),
        ("pip install tiered_kv-0.1.0-py3-none-any.whl", False),
        ("pip install tiered-kv-sqlite", True),
        ('("tier", install="pip install tiered-kv-mine")', True),
    ],
)
def test_what_installs_by_a_name_is_found(line: str, is_by_name: bool) -> None:
    assert bool([*commands_that_install_by_name(line)]) == is_by_name


def test_nothing_is_installed_by_a_name_that_no_index_has() -> None:
    """Whoever registers that name would be installed beside an engine."""
    found = {
        str(path.relative_to(ROOT)): lines
        for path in TEXTS
        if (lines := [*commands_that_install_by_name(path.read_text())])
    }
    assert found == {}


@pytest.mark.parametrize("path", [*EXAMPLES.glob("*.yaml"), *EXAMPLES.glob("*.py")], ids=lambda path: path.name)
def test_an_example_names_the_extras_that_it_needs(path: Path) -> None:
    text = path.read_text()
    tiers = set(re.findall(r"""type"?: "?(\w+)""", text))
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", text, re.MULTILINE))
    needed = {extra for extra, library in LIBRARIES.items() if extra in tiers or library in imported}
    needed |= {"metrics"} if '"metrics": {"listen"' in text else set()
    named = re.search(r"pip install '\.\[([a-z0-9,]+)\]'", text)
    assert needed == (set(named[1].split(",")) if named else set())


def test_the_examples_have_an_index_with_their_extras() -> None:
    index = (EXAMPLES / "README.md").read_text()
    rows = [line.split("|")[1:3] for line in index.splitlines() if line.startswith("| ") and "`" in line]
    for path in EXAMPLES.iterdir():
        if path.name != "README.md" and path.name != "__pycache__":
            assert f"`{path.name}" in index, "each example has its row"
        if path.suffix in {".py", ".yaml"} and path.name != "prices.yaml":
            (needs,) = [needs for names, needs in rows if f"`{path.name}`" in names]
            named = re.search(r"pip install '\.\[([a-z0-9,]+)\]'", path.read_text())
            assert set(re.findall(r"`(\w+)`", needs)) == (set(named[1].split(",")) if named else set())


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    def pages(entry: object) -> Iterator[str]:
        match entry:
            case str():
                yield entry
            case dict():
                for inner in entry.values():
                    yield from pages(inner)
            case list():
                for inner in entry:
                    yield from pages(inner)

    class Loader(yaml.SafeLoader):
        """Leaves out what comes from the environment, for which PyYAML has no meaning."""

    Loader.add_constructor("!ENV", lambda loader, node: None)
    text = (ROOT / ".mkdocs.yml").read_text()
    navigation = [*pages(yaml.load(text, Loader)["nav"])]  # noqa: S506 - a SafeLoader
    assert sorted(navigation) == sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))


def test_the_site_is_built_so_that_a_warning_fails() -> None:
    """MkDocs counts no warnings with --quiet, so that --strict fails nothing."""
    (build,) = re.findall(r'"mkdocs", "build", [^\n]*', TASKS)
    assert "--strict" in build
    assert not re.search(r"--quiet|-q\b", build)


def test_the_tests_admit_the_oldest_libraries_that_the_extras_admit() -> None:
    """Else a run with the oldest libraries would not try those of the extras."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def floors(names: set[str]) -> set[tuple[str, str]]:
        wanted = [each for name in names for each in extras[name]]
        return {(found[1], found[2]) for each in wanted if (found := re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", each))}

    of_extras = floors(extras.keys() - {"test", "docs", "all", "torch", "transformers"})
    assert of_extras <= floors({"test"})


def test_a_task_tries_the_oldest_libraries() -> None:
    assert '["--resolution", "lowest-direct", ".[test]"]' in TASKS
