"""Who may connect, where a user namespace leaves users out: these share one number, which is nobody in particular."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.host_server import keys_of, serving, stack_of
from tiered_kv.cli.main import main
from tiered_kv.cli.output import Status
from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.server import users
from tiered_kv.server.users import Users, unmapped_user

WHOLE = "         0          0 4294967295\n"
OUTSIDE = 4_000_000_000


def show(monkeypatch: pytest.MonkeyPatch, folder: Path, uid_map: str, overflow: str = "65534\n") -> None:
    for name, text in (("_UID_MAP", uid_map), ("_OVERFLOW_UID", overflow)):
        (folder / name).write_text(text)
        monkeypatch.setattr(users, name, folder / name)


@pytest.mark.parametrize(
    ("uid_map", "overflow", "wanted"),
    [
        (WHOLE, "65534\n", None),
        ("0 1000 1\n", "65534\n", 65534),
        ("0 1000 1\n1 100000 65535\n", "65534\n", 65534),  # a user of this number is there, too
        ("0 0 65536\n65536 65536 4294901759\n", "65534\n", None),
        ("", "65534\n", 65534),
        ("0 1000 1\n", "70000\n", 70000),
        ("0 1000 1\n", "", 65534),
    ],
)
def test_the_number_of_users_that_a_namespace_leaves_out(
    uid_map: str, overflow: str, wanted: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show(monkeypatch, tmp_path, uid_map, overflow)
    assert unmapped_user() == wanted


def test_without_user_namespaces_nobody_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "_UID_MAP", tmp_path / "none")
    assert unmapped_user() is None
    assert not Users([65534]).refusal(65534)


def test_that_number_is_neither_advised_nor_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, tmp_path, WHOLE)
    assert str(Users().refusal(65534)).endswith("--allow-user 65534")
    show(monkeypatch, tmp_path, "0 1000 1\n")
    said = str(Users([1234]).refusal(65534))
    assert "--allow-user" not in said
    assert "uid_map" in said
    assert "in one user namespace" in said
    assert not Users([1234]).refusal(1234)
    assert str(Users([1234]).refusal(4321)).endswith("--allow-user 4321")
    with pytest.raises(ConfigError, match=r"--allow-user: expected a user, found 65534.*in one user namespace"):
        Users([1234, 65534])


def test_the_number_does_not_pass_for_the_server_s_own_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, tmp_path, "0 1000 1\n")
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert "cannot tell who" in str(Users().refusal(65534))


@pytest.mark.parametrize("user", ["65534", "nobody"])
def test_a_server_does_not_start_with_that_number(
    user: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show(monkeypatch, tmp_path, "0 1000 1\n")
    assert main(["serve", "no.yaml", "--socket", str(tmp_path / "socket"), "--allow-user", user]) == Status.ERROR
    assert "found 65534" in capsys.readouterr().err
    assert not (tmp_path / "socket").exists()


def test_who_is_refused_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as served:
        show(monkeypatch, tmp_path, "0 1000 1\n")
        allowed, said = served.server._acceptor.users, Users().refusal(65534)
        monkeypatch.setattr(served.server._acceptor, "users", Users())
        monkeypatch.setattr(served.server._acceptor.users, "refusal", lambda _: said)
        with pytest.raises(TieredKVError, match="cannot tell who this process is"):
            served.engine()
        served.server._acceptor.users = allowed
        assert served.engine().store(keys_of(4)) == keys_of(4)


PROGRAM = """
import os, sys
import tiered_kv, tiered_kv.server.connect
os.setgroups([])
os.setresgid(*3 * [int(sys.argv[2])])
os.setresuid(*3 * [int(sys.argv[2])])
try:
    tiered_kv.connect(sys.argv[1]).close()
    print("attached")
except tiered_kv.TieredKVError as error:
    print(error)
"""


def can_map_users() -> bool:
    command = ["unshare", "--user", "--map-root-user", "true"]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not can_map_users(), reason="takes root, and user namespaces")
def test_no_user_outside_of_a_server_s_namespace_gets_in(closing: ExitStack) -> None:
    folder = Path(closing.enter_context(TemporaryDirectory(dir="/tmp")))
    folder.chmod(0o755)  # the directories of pytest are for root alone
    stack, path, log = folder / "stack.yaml", folder / "socket", folder / "log"
    stack.write_text(str(stack_of()).replace("'", '"'))
    serve = [sys.executable, "-m", "tiered_kv", "serve", str(stack), "--socket", str(path)]
    with log.open("w") as file:
        command = ["unshare", "--user", "--map-root-user", *serve]
        server = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        end_s = time.monotonic() + 60.0
        while "serving" not in log.read_text():
            assert server.poll() is None
            assert time.monotonic() < end_s, log.read_text()
            time.sleep(0.05)
        path.chmod(0o666)
        for user in (0, 1234, OUTSIDE):
            command = [sys.executable, "-c", PROGRAM, f"unix:{path}", str(user)]
            said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
            assert said == "attached\n" if user == 0 else "cannot tell who this process is" in said
    finally:
        server.terminate()
        server.wait(30)
    command = ["unshare", "--user", "--map-root-user", *serve, "--allow-user", "65534"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == Status.ERROR
    assert "found 65534" in done.stderr
