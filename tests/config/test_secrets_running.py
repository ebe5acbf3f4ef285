"""No secret is shown by a stack that runs, nor by the command: a marker is planted in each secret setting of each tier
type, and looked for in the log, errors, counters, descriptions, objects and what other processes see.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.loopback import Parrot
from tests.support.redis_servers import RedisServer
from tests.support.s3_servers import REGION, missing_for_moto, start_moto
from tests.support.secret_hunt import (
    STACK,
    Sheet,
    entry_of,
    hunt_in_running_stacks,
    new_marker,
    places_of,
    scenes_of,
    show_running_stack,
    with_markers,
)
from tiered_kv.config.hooks import tier_plugins
from tiered_kv.metrics.counters import count_of
from tiered_kv.stack.open import Stack


@pytest.fixture
def parrot() -> Iterator[Parrot]:
    parrot = Parrot()
    yield parrot
    parrot.close()


@pytest.fixture
def nothing_of_aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration of AWS's but the test's own."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


WITH_SECRETS = [name for name in tier_plugins().tier_types() if any(each.is_secret for each in places_of(name))]


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_of_aws")
@pytest.mark.parametrize("type_name", WITH_SECRETS)
def test_no_running_stack_shows_a_secret(type_name: str, parrot: Parrot, tmp_path: Path) -> None:
    sheet = hunt_in_running_stacks(type_name, parrot.port, tmp_path)
    assert sheet.findings() == []
    assert len(sheet) > 10


@pytest.mark.slow
def test_no_refused_password_is_shown_by_a_real_redis(tmp_path: Path) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    names = ("the password", "a wrong password", "a user's password", "a user")
    markers = {name: new_marker() for name in names}
    password, wrong, of_user, user = markers.values()
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis", password=password)
    sheet = Sheet(markers)
    opened: list[bool] = []
    server.start()
    try:
        server.call("ACL", "SETUSER", user, "on", f">{of_user}", "~none*", "+get")
        for settings in (
            {"password": password},
            {"password": wrong},
            {"username": user, "password": of_user},
            {"username": user, "password": wrong},
            {"url": f"redis://{user}:{wrong}@127.0.0.1:{server.port}"},
            {},
        ):
            patient = {"job_timeout": "60s", "timeout": "60s", "connect_timeout": "30s"}  # it answers, if late
            entry = {"type": "redis", "url": server.url, **patient, **settings}
            opened.append(show_running_stack(sheet, f"with {sorted(settings)}", {**STACK, "secondary": [entry]}))
    finally:
        server.kill()
    assert sheet.findings() == []
    assert opened == [True, False, False, False, False, False]


ANSWERED = {"job_timeout": "60s", "request_timeout": "60s", "lookup_timeout": "60s"}
"""Of a tier whose server answers: what it says is waited for, also on a machine that holds it up."""


def swept(stack: Stack) -> bool:
    """Return whether blocks were deleted: for that the tier uses boto3's own client, whose log tells much."""
    return count_of(stack.counters(), "s3", "tier", "deleted_blocks_total") > 0


def refused(stack: Stack) -> bool:
    return count_of(stack.counters()["s3"], "failed_blocks_total", "store", "denied") > 0


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_of_aws")
@pytest.mark.parametrize("checks_signatures", [False, True])
def test_no_key_is_shown_by_a_real_s3_server(
    checks_signatures: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing := missing_for_moto():
        pytest.skip(missing)
    markers = {name: new_marker() for name in ("access_key_id", "secret_access_key", "session_token", "in a file")}
    key_id, secret, token, in_file = markers.values()
    (tmp_path / "aws-credentials").write_text(
        f"[kv]\naws_access_key_id = {key_id}\naws_secret_access_key = {in_file}\naws_session_token = {token}\n"
    )
    sheet = Sheet(markers)
    # moto checks signatures after so many requests; one makes the bucket.
    monkeypatch.setenv("INITIAL_NO_AUTH_ACTION_COUNT", "1" if checks_signatures else "inf")
    server = start_moto()
    try:
        given = {"bucket": server.make_bucket(), "endpoint_url": server.url, "region": REGION, "addressing": "path"}
        explicit = {"access_key_id": key_id, "secret_access_key": secret, "session_token": token}
        for settings in (explicit, {"profile": "kv"}):
            entry = {"type": "s3", "attempts": 1, **ANSWERED, **given, **settings}
            source = {**STACK, "secondary": [{**entry, "ttl": "1ms", "sweep_interval": "50ms"}]}
            # It ends what it was given, since a reset in between would make it void.
            until = refused if checks_signatures else swept
            show_running_stack(sheet, f"s3 with {sorted(settings)}", source, until=until, wait_s=60.0)
    finally:
        server.stop()
    assert sheet.findings() == []


COMMANDS = """
import json, logging, sys
logging.basicConfig(level=logging.DEBUG)
from tiered_kv.cli.main import main
from tests.support.secret_hunt import process_as_seen
for command in json.loads(sys.argv[1]):
    try:
        print("status", main(command))
    except SystemExit as error:
        print("exit", error)
print(*process_as_seen())
"""


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_of_aws")
@pytest.mark.parametrize("type_name", WITH_SECRETS)
def test_no_command_prints_a_secret(type_name: str, parrot: Parrot, tmp_path: Path) -> None:
    markers = {".".join(each.path): new_marker() for each in places_of(type_name) if each.is_secret}
    variables = {path: path.upper().replace(".", "_") for path in markers}
    scene = next((scene for scene in scenes_of(type_name, parrot.port, tmp_path / "none") if scene), {})
    commands: list[list[str]] = [["plugins"], ["schema"], ["plugins", "--json"]]
    for number, entry in enumerate(
        [
            with_markers(entry_of(type_name), markers),
            with_markers({**entry_of(type_name), **scene}, {path: f"${{{name}}}" for path, name in variables.items()}),
            {**with_markers(entry_of(type_name), markers), "colour": "red", "job_timeout": "soon"},
        ]
    ):
        entry.pop("tls_key_password", None)  # which asks for TLS
        stack = str(tmp_path / f"{number}.yaml")
        Path(stack).write_text(yaml.safe_dump({**STACK, "secondary": [entry]}))
        small = ["--requests", "2"]
        commands += [["check", stack], ["check", stack, "--json"], ["check", stack, "--debug"]]
        commands += [["replay", stack, *small], ["replay", stack, "--json", "--debug", *small]]
        commands += [["bench", stack, "--blocks", "2", "--batch", "2", "--rounds", "1", "--json"]]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        cwd=tmp_path,  # where relative paths lead to
        env={**os.environ, **{variables[path]: text for path, text in markers.items()}},
    )
    sheet = Sheet(markers)
    sheet.note("standard output", done.stdout)
    sheet.note("standard error", done.stderr)
    assert len([line for line in done.stdout.splitlines() if line.startswith("status ")]) == len(commands)
    assert sheet.findings() == []
