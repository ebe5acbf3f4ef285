"""Builds an image without a container engine, and runs its commands: each stage of a Dockerfile is a directory.

Where the Dockerfile says FROM, the directory begins with this machine's programs and Python, read-only, and a copy of
its /etc; all else is empty. Needs root. All mounts are in a mount namespace of their own, which ends with `main`: the
caller may remove the directories afterwards, and not before.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", sys.base_prefix)
DEVICES = ("null", "zero", "random", "urandom")
_SECONDS_MAX = 600
_READY_S = 60.0


@dataclass
class Stage:
    """One stage, and what the image of it would be started with."""

    root: Path
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    def make_root(self) -> None:
        for name in PROGRAMS:
            inner = self.root / name.lstrip("/")
            if os.path.islink(name):
                inner.symlink_to(os.readlink(name))
            elif os.path.isdir(name):
                inner.mkdir(parents=True)
                _run("mount", "--bind", name, str(inner))
                _run("mount", "-o", "remount,bind,ro", str(inner))
        for name in ("dev", "proc", "run", "tmp", "var/lib"):
            (self.root / name).mkdir(parents=True)
        (self.root / "tmp").chmod(0o1777)
        for name in DEVICES:
            (self.root / "dev" / name).touch()
            _run("mount", "--bind", f"/dev/{name}", str(self.root / "dev" / name))
        _run("mount", "-t", "proc", "proc", str(self.root / "proc"))
        _run("cp", "-a", "/etc", str(self.root / "etc"))

    def popen(self, command: Sequence[str], user: str | None = None) -> subprocess.Popen[str]:
        """Start a command in the stage, as its user unless another is given."""
        path = f"{sys.base_prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        kept = {name: text for name, text in os.environ.items() if name.startswith(("PIP_CERT", "PIP_DEFAULT_TIMEOUT"))}
        return subprocess.Popen(
            ["chroot", f"--userspec={user or self.user}", str(self.root), *command],
            env={**kept, "PATH": path, "HOME": "/", "PIP_CACHE_DIR": "/tmp/pip"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: Sequence[str], user: str | None = None) -> str:
        """Run a command to its end, and return what it printed."""
        process = self.popen(command, user)
        printed, _ = process.communicate(timeout=_SECONDS_MAX)
        assert process.returncode == 0, f"{command}: {printed}"
        return printed

    def copy(self, source: Path, names: Sequence[str], to: str) -> None:
        target = self.root / to.lstrip("/")
        for name in names:
            path = source / name.lstrip("/")
            if path.is_dir():
                shutil.copytree(path, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)


def instructions(dockerfile: Path) -> Iterator[tuple[str, str]]:
    """Return each instruction of a Dockerfile, and what follows it."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        yield name, rest.strip()


def build(dockerfile: Path, context: Path, folder: Path) -> Stage:
    """Build all stages below `folder`, and return the last one."""
    stages: dict[str, Stage] = {}
    stage = Stage(folder)
    for name, rest in instructions(dockerfile):
        if name == "FROM":
            _, _, alias = rest.partition(" AS ")
            stage = stages[alias or str(len(stages))] = Stage(folder / str(len(stages)))
            stage.make_root()
        elif name == "COPY":
            option = re.match(r"--from=(\S+) ", rest)
            *names, to = rest[option.end() :].split() if option else rest.split()
            stage.copy(stages[option[1]].root if option else context, names, to)
        elif name == "RUN":
            stage.run(["sh", "-c", rest])
        elif name == "USER":
            stage.user = rest
        elif name == "ENTRYPOINT":
            stage.entrypoint = json.loads(rest)
        elif name == "CMD":
            stage.command = json.loads(rest)
        elif name == "HEALTHCHECK":
            stage.health = json.loads(rest.partition("CMD ")[2])
        else:
            assert name == "EXPOSE", name
    return stage


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=_SECONDS_MAX)


def main() -> None:
    """Build an image, and print what its commands print: arguments are the Dockerfile, its context and a directory."""
    stage = build(*map(Path, sys.argv[1:4]))
    print(
        json.dumps(
            {
                "version": stage.run([*stage.entrypoint, "--version"]),
                "id": stage.run(["id"]),
                "tiers": stage.run(["/opt/tiered-kv/bin/python3", "-c", _TIERS]),
                "modes": stage.run(["stat", "-c", "%a %u:%g %n", "/run/tiered-kv", "/var/lib/tiered-kv"]),
                "status": serve(stage),
            }
        )
    )


def serve(stage: Stage) -> int:
    """Start the image's server until its check of health is content, and end it as an engine of containers does."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]  # not the image's, since this machine may have a server there
    folder = stage.root / "etc/tiered-kv"
    folder.mkdir()
    nvme = "{type: nvme, path: /var/lib/tiered-kv/blocks, capacity: 64MiB}"
    text = f"primary: {{capacity: 1MiB}}\nsecondary: [{nvme}]\nmetrics: {{listen: '127.0.0.1:{port}'}}\n"
    (folder / "stack.yaml").write_text(text)
    (stage.root / "tmp").chmod(0o755)  # as where the root file system is read-only: nothing but the volumes is writable
    health = [part.replace("9464", str(port)) for part in stage.health]
    with stage.popen([*stage.entrypoint, *stage.command]) as server:
        end_s = time.monotonic() + _READY_S
        while stage.popen(health).wait(_READY_S) and time.monotonic() < end_s:
            time.sleep(0.1)
        assert (stage.root / "run/tiered-kv/cache.sock").is_socket()
        server.terminate()
        return server.wait(_READY_S)


_TIERS = "import redis, boto3, aiofiles, prometheus_client, tiered_kv; print(tiered_kv.__file__)"

if __name__ == "__main__":
    main()
