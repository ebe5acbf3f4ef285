"""The quick tests of memory, alignment, disk and server where a page has 16 KiB: on an emulated arm64 machine.

TIERED_KV_VM_SCRIPT names a file of shell functions. `vm arm64-16k "DEBIAN PACKAGES" < SCRIPT` boots such a machine with
Debian 13, where VM_COPY is in /root, runs the script, prints what it prints, and ends with its status. VM_SECONDS,
VM_CPUS and VM_MIB limit it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/cpu/test_region.py",
    "tests/server/test_memory.py",
    "tests/server/test_pages.py",
    "tests/plugins/nvme/test_store.py",
)
LIBRARIES = ("numpy", "pluggy", "pydantic", "PyYAML", "xxhash", "rich", "aiofiles", "zstandard", "cryptography")
TEST_LIBRARIES = ("pytest", "pytest-xdist", "hypothesis", "prometheus-client")
PLATFORMS = ("manylinux2014_aarch64", "manylinux_2_17_aarch64", "manylinux_2_28_aarch64")
PYTHON = "3.13"
"""Of Debian 13."""
NAMESPACE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Mounts of a machine that is being built end with its processes: nobody could remove the folder that has them."""
MACHINE_S = 1500
BUILD_S = 900
INSIDE = f"""
cd /root/machine
getconf PAGESIZE
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=site:.
set -- -m "not slow" -p no:cacheprovider --basetemp /root/tests
python3 -m pytest -q "$@" {" ".join(TESTS)}
"""


@pytest.mark.slow
@pytest.mark.full
def test_memory_disk_and_server_are_right_where_a_page_has_16_KiB(tmp_path: Path) -> None:
    script = os.environ.get("TIERED_KV_VM_SCRIPT", "")
    if missing := missing_for(script):
        pytest.skip(missing)
    machine = tmp_path / "machine"
    shutil.copytree(ROOT / "tests", machine / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", machine)
    foreign = [f"--platform={name}" for name in PLATFORMS]
    install(
        machine / "site", "--only-binary=:all:", f"--python-version={PYTHON}", *foreign, *LIBRARIES, *TEST_LIBRARIES
    )
    install(machine / "site", "--no-deps", "--no-build-isolation", "--upgrade", str(ROOT))
    limits = {"VM_COPY": str(machine), "VM_SECONDS": str(MACHINE_S), "VM_CPUS": "1", "VM_MIB": "2048"}
    done = subprocess.run(
        [*NAMESPACE, "bash", "-c", '. "$0" && vm arm64-16k "python3 libstdc++6"', script],
        input=INSIDE,
        env={**os.environ, **limits},
        capture_output=True,
        text=True,
        check=False,
        timeout=MACHINE_S + BUILD_S,
    )
    print(done.stdout, done.stderr)
    assert "16384" in done.stdout.splitlines()
    assert done.returncode == 0


def missing_for(script: str) -> str:
    """Return why there is no such machine here; "" if there is one."""
    if not os.path.isfile(script):
        return "TIERED_KV_VM_SCRIPT does not name a file"
    for program in ("bash", "mmdebstrap", "qemu-system-aarch64", "qemu-aarch64-static", "update-binfmts"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return "" if os.geteuid() == 0 else "to build a machine takes root"


def install(folder: Path, *arguments: str) -> None:
    """Unpack wheels into a folder; skip the test where they are not to be had."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_S)
    if done.returncode:
        pytest.skip(f"wheels are not to be had: {(done.stderr.strip() or 'pip failed').splitlines()[-1]}")
