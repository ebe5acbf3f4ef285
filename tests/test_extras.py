"""A stack that needs a library which is not installed says which extra brings it, wherever it is opened."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.stacks import BUILT_IN_TIERS, IN_DIRECTORIES, stack_of
from tiered_kv.config.hooks import imported
from tiered_kv.errors import MissingExtraError

ROOT = Path(__file__).parents[1]
Entry = dict[str, object]


class Told(NamedTuple):
    """The error of `open_stack`, if any, and the status and output of `tiered-kv check`."""

    error: str
    status: int
    output: str


LIBRARIES = {
    "redis": ("redis",),
    "s3": ("boto3", "botocore"),
    "fs": ("aiofiles",),
    "gcs": ("obstore",),
    "azure": ("obstore",),
    "zstd": ("zstandard", "compression"),
    "crypto": ("cryptography",),
    "metrics": ("prometheus_client",),
    "completion": ("argcomplete",),
    "events": ("zmq", "msgspec"),
}
"""What is missing where an extra was not installed."""

NO_TIER = {"docs", "report", "torch", "transformers", "test", "all"}
"""Extras that no tier type and no codec asks for."""

CODECS: dict[str, Entry] = {
    "zstd": {"codec": "zstd"},
    "crypto": {"codec": "aes-256-gcm", "encryption": {"keys": {1: "00" * 32}}},
}
"""What asks for an extra in the entry of any tier."""

PROGRAM = """
import contextlib, io, json, sys

missing, stacks = json.loads(sys.argv[1])

class WithoutExtras:
    '''The finder of installed modules, for which some are not installed: not even `find_spec` knows of them.'''

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in missing else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [WithoutExtras(finder) for finder in sys.meta_path]

import tiered_kv
from tiered_kv.cli.main import main

error_text = {}
for name, stack in stacks.items():
    try:
        tiered_kv.open_stack(stack).close()
        error = ""
    except tiered_kv.TieredKVError as raised:
        error = f"{type(raised).__name__}: {raised}"
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        status = main(["check", stack])
    error_text[name] = [error, status, output.getvalue() + errors.getvalue()]
with contextlib.redirect_stdout(io.StringIO()):
    error_text["plugins"] = ["", main(["plugins"]), ""]
    error_text["schema"] = ["", main(["schema"]), ""]
print(json.dumps(error_text))
"""


def told_without_extras(entries: Mapping[str, Entry], directory: Path) -> dict[str, Told]:
    """Return what is reported of a stack for each entry where the libraries of all extras are missing."""
    stacks = {}
    for name, entry in entries.items():
        own = {"path": str(directory / name)} if entry["type"] in IN_DIRECTORIES else {}
        stacks[name] = str(directory / f"{name}.yaml")
        Path(stacks[name]).write_text(json.dumps(stack_of({**entry, **own}, blocks=256)))  # which is YAML too
    missing = [module for modules in LIBRARIES.values() for module in modules]
    command = [sys.executable, "-c", PROGRAM, json.dumps([missing, stacks])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return {name: Told(*error_text) for name, error_text in json.loads(done.stdout).items()}


def test_every_extra_is_looked_at() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    assert extras == LIBRARIES.keys() | NO_TIER
    for extra, modules in LIBRARIES.items():
        distribution = {"zmq": "pyzmq"}.get(modules[0], modules[0])
        wanted = project["optional-dependencies"][extra]
        assert any(needed.replace("-", "_").startswith(distribution) for needed in wanted)


def test_all_brings_no_cuda_and_every_extra_of_tiers_and_codecs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    assert set(everything.partition("[")[2].rstrip("]").split(",")) == LIBRARIES.keys() | {"report"}


def test_every_package_of_the_wheel_has_types() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    packages = tool["hatch"]["build"]["targets"]["wheel"]["packages"]
    own = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("plugins/*/__init__.py")}
    assert set(packages) == own | {"tiered_kv"} == set(tool["check-wheel-contents"]["package"])
    assert [package for package in packages if not (ROOT / package / "py.typed").is_file()] == []


def assert_install_command(error_text: Told, feature: str, extra: str) -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    libraries = " ".join(f"'{library.partition(';')[0]}'" for library in wanted)
    command = f"{feature} needs a library that is not installed (the extra '{extra}'): pip install {libraries}"
    assert error_text.error == f"MissingExtraError: {command}"
    assert error_text.status == 1
    assert command in " ".join(error_text.output.split())
    assert "Traceback" not in error_text.output


def test_without_any_extra_a_stack_says_which_one_it_needs(tmp_path: Path) -> None:
    local: dict[str, Entry] = {name: {"type": name, **BUILT_IN_TIERS[name]} for name in ("memory", "nvme")}
    tiers: dict[str, Entry] = {
        extra: {"type": extra, **BUILT_IN_TIERS[extra]} for extra in LIBRARIES if extra in BUILT_IN_TIERS
    }
    encoded = {
        f"{extra}-{name}": {**entry, **codec} for extra, codec in CODECS.items() for name, entry in local.items()
    }
    error_text = told_without_extras({**local, **tiers, **encoded}, tmp_path)
    for extra in tiers:
        assert_install_command(error_text[extra], f"tier '{extra}'", extra)
    for name in encoded:
        extra = name.partition("-")[0]
        assert_install_command(error_text[name], f"codec '{CODECS[extra]['codec']}'", extra)
    for name in local:
        assert (error_text[name].error, error_text[name].status) == ("", 0), "a tier that needs no extra works"
    assert (error_text["plugins"].status, error_text["schema"].status) == (0, 0), "no plugin is broken by it"


def test_the_author_of_a_tier_says_how_to_install_its_library() -> None:
    advised = MissingExtraError("tier 'mine'", install="pip install mine-client")
    assert str(advised) == "tier 'mine' needs a library that is not installed: pip install mine-client"
    assert str(MissingExtraError("tier 'mine'", "mine")) == "tier 'mine' needs a library that is not installed"
    load = imported("mine.tier:Tier", library="no_such_library", install="pip install no-such-library")
    with pytest.raises(MissingExtraError, match=r"tier 'no_such_library' .*: pip install no-such-library$"):
        load()


@pytest.mark.parametrize("extra", [*LIBRARIES, "transformers", "metrics", "events", "report"])
def test_no_message_installs_this_distribution_by_name(extra: str) -> None:
    """And what follows the colon can be pasted into a shell: it is one command, whose versions redirect nothing."""
    said = str(MissingExtraError("it", extra))
    words = list(shlex.shlex(said.partition(": ")[2], posix=True, punctuation_chars=True))
    assert words[:2] == ["pip", "install"], said
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    assert sorted(words[2:]) == sorted(library.partition(";")[0] for library in wanted)
    assert "tiered" not in said


@pytest.mark.parametrize(
    ("extra", "version", "is_old"),
    [("crypto", "38.0.4", True), ("crypto", "47.0.0", False), ("redis", "5.2.9rc1", True), ("events", "0.9", True)],
)
def test_a_library_that_is_too_old_is_named_with_both_versions(
    extra: str, version: str, is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    said = str(MissingExtraError("it", extra))
    assert (f"{wanted[0]}, and {version} is installed" in said) is is_old
    assert ("not installed" in said) is not is_old
    assert said.rpartition(": ")[2].startswith("pip install ")


def test_a_tier_whose_library_lacks_a_name_says_that_it_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    load = imported("tiered_kv_redis.tier:NoSuchTier", library="json", extra="redis")
    with pytest.raises(AttributeError):
        load()
    load = imported("tiered_kv_redis.no_such_module:Tier", library="json", extra="redis")
    with pytest.raises(ModuleNotFoundError):
        load()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.6.0")
    with pytest.raises(MissingExtraError, match=r"tier 'redis' needs redis>=5\.3, and 4\.6\.0 is installed"):
        load()


def test_files_without_metadata_say_which_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", fail)
    assert str(MissingExtraError("it", "redis")).endswith(
        " (the extra 'redis'): install what the pyproject.toml of tiered-kv lists there"
    )
