"""Importing is cheap, needs no extra, and runs one way."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiered_kv
from tiered_kv import toolkit

ROOT = Path(__file__).parent.parent
EXTRAS = frozenset(
    {
        "torch",
        "triton",
        "transformers",
        "vllm",
        "lmcache",
        "sglang",
        "redis",
        "boto3",
        "obstore",
        "botocore",
        "aiofiles",
        "cryptography",
        "zstandard",
        "matplotlib",
        "prometheus_client",
        "argcomplete",
        "zmq",
        "msgspec",
    }
)
IMPORT_LIMIT_S = 0.150
PLUGINS = sorted(path.name for path in (ROOT / "plugins").glob("tiered_kv_*"))

ENGINES = ("lmcache", "sglang", "transformers", "vllm")
"""Whose plugins are there, beside those of tiers."""
GROUND = "base mediums abstract backend errors hints received reasons"
"""The interfaces and words that every room uses."""
ROOMS: list[tuple[str, ...]] = [
    (*(f"tiered_kv.{name}" for name in GROUND.split()), "tiered_kv.config.units"),
    ("tiered_kv.system",),
    ("tiered_kv.config",),
    ("tiered_kv.shares",),
    ("tiered_kv.metrics",),
    ("tiered_kv.cpu",),
    (
        "tiered_kv.config.hooks",
        "tiered_kv.config.entries",
        "tiered_kv.config.stack_config",
    ),  # what a stack is made of: policies, types of tiers
    ("tiered_kv.tiering",),
    ("tiered_kv.toolkit",),
    ("tiered_kv_",),  # the tiers' plugins
    ("tiered_kv.stack",),
    ("tiered_kv.copying",),
    ("tiered_kv.direct",),
    ("tiered_kv.worker",),
    ("tiered_kv.server",),
    ("tiered_kv_host",),  # a client of the server
    ("tiered_kv.workload",),
    ("tiered_kv.testing",),
    ("tiered_kv.engines",),
    tuple(f"tiered_kv_{engine}" for engine in ENGINES),
    ("tiered_kv.cli", "tiered_kv.__main__"),
]
"""Who may import whom: each room those above it, and itself."""

LINES_MAX = 400
LONGER = {
    "tiered_kv.base": "an interface as it was given",
}
"""Files with more lines than others, and why."""


def run_fresh(program: str) -> object:
    """Return the JSON that `program` prints in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=300)
    answer: object = json.loads(done.stdout)
    return answer


def sources() -> list[tuple[str, Path]]:
    """Return each module of the distribution and its file."""
    found = []
    for top in [ROOT / "tiered_kv", *(ROOT / "plugins" / name for name in PLUGINS)]:
        for path in sorted(top.rglob("*.py")):
            parts = path.relative_to(top.parent).with_suffix("").parts
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def imports_of(path: Path, *, top_level_only: bool = False) -> frozenset[str]:
    """Return the modules that `path` imports when it runs, imports for type checkers left out."""
    top_level, in_functions, _ = _imports(path)
    return top_level if top_level_only else top_level | in_functions


@functools.cache
def _imports(path: Path) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return what is imported when the file is, what in functions, and what for type checkers."""
    found: tuple[set[str], set[str], set[str]] = set(), set(), set()
    waiting: list[tuple[ast.AST, int]] = [(ast.parse(path.read_text()), 0)]
    while waiting:
        node, kind = waiting.pop()
        if isinstance(node, ast.Import):
            found[kind].update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found[kind].update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            kind = max(kind, 1)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            kind = 2
        # An expression contains no statement.
        inner = (
            each for name in ("body", "orelse", "finalbody", "handlers", "cases") for each in getattr(node, name, ())
        )
        waiting += [(child, kind) for child in inner]
    top_level, in_functions, for_types = map(frozenset, found)
    return top_level, in_functions, for_types


def room_of(module: str) -> int:
    """Return the number of the room of `module`, by the longest name that fits."""
    fitting = [
        (len(name), number)
        for number, names in enumerate(ROOMS)
        for name in names
        if module == name or module.startswith(f"{name}.") or (name.endswith("_") and module.startswith(name))
    ]
    assert fitting, f"{module} has no room: add it to ROOMS"
    return max(fitting)[1]


def is_ours(module: str) -> bool:
    return module.partition(".")[0].startswith("tiered_kv") and module != "tiered_kv.__version__"


def test_what_ships_names_no_test_and_what_authors_test_with_no_built_in_tier() -> None:
    for module, path in sources():
        text = path.read_text()
        assert "tests.support" not in text, module
        if module.split(".")[:2] == ["tiered_kv", "testing"]:
            assert [plugin for plugin in PLUGINS if re.search(rf"\b{plugin}\b", text)] == [], module
        else:
            assert "tiered_kv.testing" not in text, module


def test_importing_the_package_is_fast_and_loads_nothing_heavy() -> None:
    program = (
        "import sys, time, json; began = time.process_time(); import tiered_kv;"
        "print(json.dumps([time.process_time() - began, sorted(sys.modules)]))"
    )
    runs = [run_fresh(program) for _ in range(5)]
    times: list[float] = []
    for run in runs:
        assert isinstance(run, list)
        seconds, modules = run
        times.append(seconds)
        assert not set(modules) & (EXTRAS | {"numpy", "pydantic", "rich", "asyncio", "yaml"})
    # In time of the processor, and of the fastest: what other programs do meanwhile is not the package's.
    assert min(times) < IMPORT_LIMIT_S


def test_every_public_name_is_there_and_needs_no_extra() -> None:
    program = (
        "import sys, json, tiered_kv; from tiered_kv import toolkit; toolkit.tier_plugins();"
        "[getattr(tiered_kv, name) for name in tiered_kv.__all__ if name != 'AsyncStack'];"
        "[getattr(toolkit, name) for name in toolkit.__all__ if name != 'AsyncTier'];"
        "print(json.dumps(sorted(sys.modules)))"
    )
    modules = run_fresh(program)
    assert isinstance(modules, list)
    assert not set(modules) & (EXTRAS | {"rich", "asyncio"})


def test_a_stack_imports_what_it_uses_and_nothing_else(tmp_path: Path) -> None:
    config = {
        "namespace": {"model": "m"},
        "block": {"bytes": 4096},
        "primary": {"capacity": "1MiB"},
        "secondary": [{"type": "nvme", "path": str(tmp_path), "capacity": "64MiB"}],
    }
    program = (
        f"import json, sys, tiered_kv\ntiered_kv.open_stack({config!r}).close()\nprint(json.dumps(sorted(sys.modules)))"
    )
    modules = run_fresh(program)
    assert isinstance(modules, list)
    assert "tiered_kv_nvme.tier" in modules
    unused = [name for name in PLUGINS if name != "tiered_kv_nvme"] + [
        "tiered_kv.stack.exporters",
        "tiered_kv.tiering.audit",
    ]
    assert set(modules) & {*unused, *EXTRAS, "http.server", "rich", "asyncio"} == set()


@pytest.mark.parametrize("package", [tiered_kv, toolkit])
def test_the_public_names_are_sorted_and_complete(package: Any) -> None:
    assert package.__all__ == sorted(package.__all__)
    assert all(getattr(package, name) is not None for name in package.__all__)
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        package.nonesuch  # noqa: B018 - the look-up is the point


def test_a_tier_s_author_and_a_user_have_names_of_their_own() -> None:
    assert not set(tiered_kv.__all__) & set(toolkit.__all__)


def test_announcing_a_tier_loads_no_other_part_of_the_toolkit() -> None:
    modules = run_fresh(
        "import sys, json; from tiered_kv.toolkit import TierType, hookimpl; print(json.dumps(sorted(sys.modules)))"
    )
    assert isinstance(modules, list)
    assert not set(modules) & {"numpy", "asyncio", "tiered_kv.tiering.base", "tiered_kv.toolkit.blocking"}


def test_the_version_is_the_distribution_s() -> None:
    assert tiered_kv.__version__ == importlib.metadata.version("tiered-kv")


def test_imports_run_one_way() -> None:
    for module, path in sources():
        ours = {name for name in imports_of(path) if is_ours(name)}
        if module == "tiered_kv":
            assert ours == set(), "the package imports nothing until a name is used"
            continue
        if module.startswith("tiered_kv_"):
            own = module.partition(".")[0]
            others = {name for name in ours if name.startswith("tiered_kv_") and name.partition(".")[0] != own}
            assert others == set(), f"{module} imports another plugin"
        upward = {name for name in ours if room_of(name) > room_of(module)}
        assert upward == set(), f"{module} imports upward"


def test_the_page_of_the_architecture_lists_the_rooms_in_the_order_of_their_imports() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    rows = re.findall(
        r"(?m)^  ((?:[\w/]+(?:/|\.py)(?:, )?)+) ", page.split("```text\ntiered_kv/\n")[1].split("plugins/\n")[0]
    )
    place = {re.sub(r"/$|\.py", "", name): number for number, row in enumerate(rows) for name in row.split(", ")}

    def row_of(module: str) -> int:
        folder, name = [*module.split(".")[1:], ""][:2]
        return place.get(f"{folder}/{name}", place[folder])

    for module, path in sources():
        if module.startswith("tiered_kv.") and module != "tiered_kv.__main__":
            ours = {name for name in imports_of(path) if name.startswith("tiered_kv.") and is_ours(name)}
            assert {name for name in ours if row_of(name) > row_of(module)} == set(), f"{module} imports downward"


def test_imports_form_no_circle() -> None:
    """Imports for type checkers, and those within functions, count too."""
    modules = dict(sources())
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        imported = {name if name in modules else name.rpartition(".")[0] for name in frozenset().union(*_imports(path))}
        # The package's own names are imported when they are used first.
        graph[module] = set() if module == "tiered_kv" else imported & modules.keys() - {module}
    graphlib.TopologicalSorter(graph).prepare()  # raises with the circle


def test_a_file_holds_one_thing() -> None:
    for module, path in sources():
        if module in LONGER:
            continue
        lines = len(path.read_text().splitlines())
        assert lines <= LINES_MAX, f"{module} has {lines} lines: it is probably two"


def test_a_package_that_lists_its_modules_names_those_that_it_has() -> None:
    for package in ROOT.glob("tiered_kv/**/__init__.py"):
        listed = re.findall(r"(?m)^([a-z_]+)  +[a-z]", ast.get_docstring(ast.parse(package.read_text())) or "")
        assert {
            name for name in listed if not [*package.parent.glob(name), *package.parent.glob(f"{name}.py")]
        } == set()


def test_extras_are_imported_where_they_are_used() -> None:
    for module, path in sources():
        package, _, rest = module.partition(".")
        if package != "tiered_kv" and rest not in ("", "settings"):
            continue  # a plugin's own modules are imported when its tier is opened
        if module == "tiered_kv.worker.kernel":
            continue  # the kernel is compiled from its module, which is imported where Triton is
        tops = {name.partition(".")[0] for name in imports_of(path, top_level_only=True)}
        assert not tops & EXTRAS, f"{module} needs an extra to be imported"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "lmcache"])
def test_the_plugin_of_an_engine_needs_no_extra(engine: str) -> None:
    """It imports what the engine brings, and what every installation has."""
    of_engine = {engine, "torch", "prometheus_client"} if engine == "vllm" else {engine, "torch"}
    everywhere = {"numpy", "pluggy", "pydantic", "yaml", "xxhash"} | sys.stdlib_module_names
    for path in (ROOT / "plugins" / f"tiered_kv_{engine}").rglob("*.py"):
        tops = {name.partition(".")[0] for name in imports_of(path)}
        assert {name for name in tops if not name.startswith("tiered_kv")} <= of_engine | everywhere, path
