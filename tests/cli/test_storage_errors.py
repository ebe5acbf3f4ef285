"""Errors of storage name the endpoint, the cause and the remedy in one sentence, in every verb and log line."""

from __future__ import annotations

import logging
import re
import socket
import time
from pathlib import Path

import pytest

from tests.support.command import Command
from tests.support.faulty import FourMethodTier
from tests.support.loopback import LoopbackServer
from tests.support.redis_servers import RedisServer, make_tls_files
from tests.support.stacks import stack_file
from tests.support.status_server import StatusServer, response
from tiered_kv.cli.main import main

S3 = "bucket: blocks, access_key_id: an-id, secret_access_key: a-secret, attempts: 1, region: us-east-1"
VERBS = [["check"], ["inspect"], ["purge", "--yes"], ["bench", "--blocks", "2", "--rounds", "1"]]
METHOD_NAMES = re.compile(r"\b(describe|survey|epoch|list|sign|versioning):|EndpointConnectionError|\[Errno|Error \d")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
@pytest.mark.parametrize(
    ("tier", "says"),
    [
        (
            "type: redis, url: 'redis://127.0.0.1:1'",
            "the server 127.0.0.1:1 cannot be reached (Connection refused); start it, or correct its address",
        ),
        (
            "type: redis, url: 'redis://no-such-host.invalid'",
            "the server no-such-host.invalid:6379 cannot be reached (*); correct the host's name in the stack, or this",
        ),
        (
            "type: s3, endpoint_url: 'http://127.0.0.1:1', " + S3,
            "the bucket http://127.0.0.1:1/blocks does not serve requests (Connection refused); start the server",
        ),
        (
            "type: s3, endpoint_url: 'http://no-such-host.invalid', " + S3,
            "the bucket http://no-such-host.invalid/blocks does not serve requests (*); correct the host in",
        ),
        (
            "type: fs, capacity: 64MiB, path: /proc/no-such-directory",
            "the directory /proc/no-such-directory cannot be used: No such file or directory; give a path",
        ),
    ],
)
def test_a_dead_storage_is_named_with_cause_and_remedy(
    verb: list[str],
    tier: str,
    says: str,
    tmp_path: Path,
    command: Command,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = stack_file(tmp_path, tier)
    if "/proc" in tier and verb[0] in ("inspect", "purge"):
        assert "looked at /proc/no-such-directory (no such directory)" in command.out(*verb[:1], file, *verb[1:])
        return
    began_s = time.monotonic()
    assert main([verb[0], file, *verb[1:]]) == 1
    shown = " ".join((capsys.readouterr().out + caplog.text).split())
    said = re.findall(re.escape(says).replace(r"\*", r"[^;]*"), shown)  # * is what the resolver says
    assert len(said) == 1, "in the table or below it, and not in the log, too"
    assert not METHOD_NAMES.search(shown)
    assert "a-secret" not in shown
    assert time.monotonic() - began_s < 60.0


class Silent(LoopbackServer):
    """Reads requests, and answers none."""

    def serve(self, sock: socket.socket) -> None:
        while sock.recv(1 << 16):
            pass


@pytest.mark.parametrize("is_engines", [False, True])
@pytest.mark.parametrize("verb", [["inspect"], ["purge", "--yes"]], ids=lambda verb: verb[0])
def test_a_bucket_that_does_not_answer_takes_no_longer_than_the_timeout(
    verb: list[str], is_engines: bool, tmp_path: Path, command: Command
) -> None:
    with Silent() as server:
        tier = f"type: s3, endpoint_url: 'http://{server.address}', request_timeout: 300s, " + S3
        file = stack_file(tmp_path, tier)
        if is_engines:
            lines = Path(file).read_text().splitlines(keepends=True)
            Path(file).write_text("".join(line for line in lines if not line.startswith(("namespace", "block"))))
        began_s = time.monotonic()
        shown = command.out(verb[0], file, *verb[1:], "--timeout", "300ms", status=1)
        assert time.monotonic() - began_s < 200.0, "one request may take five minutes"
    assert "does not answer in time" in " ".join(shown.split())


@pytest.mark.parametrize("kind", ["fs", "nvme"])
def test_a_file_in_place_of_a_directory_is_not_said_to_be_missing(kind: str, tmp_path: Path, command: Command) -> None:
    (tmp_path / "taken").write_text("")
    shown = command.out(
        "inspect", stack_file(tmp_path, f"type: {kind}, capacity: 64MiB, path: {tmp_path / 'taken'}"), status=1
    )
    assert "is a file" in shown
    assert "no such directory" not in shown


def test_a_path_that_leads_through_a_file_says_which(tmp_path: Path, command: Command) -> None:
    (tmp_path / "taken").write_text("")
    file = stack_file(tmp_path, f"type: nvme, capacity: 64MiB, path: {tmp_path / 'taken' / 'kv'}")
    shown = " ".join(command.out("check", file, status=1).split())
    assert f"File exists ({tmp_path / 'taken'}), and is no directory; give another path" in shown


def test_what_redis_says_about_a_database_that_it_does_not_have_is_shown(
    redis_server: RedisServer, tmp_path: Path, command: Command
) -> None:
    file = stack_file(tmp_path, f"type: redis, url: '{redis_server.url}', db: 99")
    for verb in VERBS:
        shown = " ".join(command.out(verb[0], file, *verb[1:], status=1).split())
        assert f":{redis_server.port} " in shown
        assert "DB index is out of range" in shown
        assert "raise its 'databases'" in shown


class WarningTier(FourMethodTier):
    """Says something that no table has."""

    def describe(self) -> dict[str, object]:
        logging.getLogger("a.plugin").warning("the moon is full")
        return {}


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_a_warning_of_a_tier_without_an_error_is_logged(
    verb: list[str], tmp_path: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    command.out(verb[0], stack_file(tmp_path, f"type: '{__name__}:WarningTier'"), *verb[1:], status=verb[0] == "purge")
    assert caplog.messages.count("the moon is full") == {"check": 2}.get(verb[0], 0)


@pytest.mark.parametrize("verb", [VERBS[0], VERBS[1]], ids=lambda verb: verb[0])
def test_an_endpoint_without_tls_is_named(verb: list[str], tmp_path: Path, command: Command) -> None:
    with StatusServer(lambda: response(b"", "HTTP/1.1 400 Bad Request")) as endpoint:
        tier = f"type: s3, endpoint_url: 'https://127.0.0.1:{endpoint.port}', {S3}"
        shown = " ".join(command.out(verb[0], stack_file(tmp_path, tier), status=1).split())
    assert "does not speak TLS" in shown
    assert "write 'http://' in place of 'https://'" in shown


@pytest.mark.parametrize(
    ("has_tls", "verb"),
    [(True, VERBS[0]), (True, VERBS[1]), (False, VERBS[0]), pytest.param(False, VERBS[1], marks=pytest.mark.slow)],
)
def test_a_server_with_tls_and_a_client_without_it_or_the_reverse_is_named(
    has_tls: bool, verb: list[str], tmp_path: Path, command: Command
) -> None:
    with RedisServer(tmp_path / "redis", tls=make_tls_files(tmp_path) if has_tls else None) as server:
        url = f"{'redis' if has_tls else 'rediss'}://127.0.0.1:{server.port}"
        shown = command.out(verb[0], stack_file(tmp_path, f"type: redis, url: '{url}'"), status=1)
    says = "speaks TLS only; write 'rediss://'" if has_tls else "does not speak TLS; write 'redis://' in place"
    assert f"the server 127.0.0.1:{server.port} {says}" in " ".join(shown.split())


def test_a_bench_of_a_dead_tier_shows_no_figure_that_was_not_measured(tmp_path: Path, command: Command) -> None:
    tiers = ["type: redis, url: 'redis://127.0.0.1:1'", "type: memory, capacity: 1MiB"]
    file = stack_file(tmp_path, *tiers)
    text = command.out("bench", file, "--blocks", "4", "--rounds", "2", status=1)
    assert "Medians (and spreads) of 2 rounds; each tier was given" in text
    assert re.search(r"redis +- +- +- +- +-\n", text)
    assert re.search(r"memory +[\d.]+ \(", text)
    assert re.search(r"memory +[\d.]+ +[\d.]+ ", command.out("bench", file, "--blocks", "4", "--rounds", "1", status=1))
    results = command.json("bench", file, "--blocks", "4", "--rounds", "2", status=1)["tiers"]
    assert (results[0]["verified_blocks"], results[1]["verified_blocks"]) == (0, 8)
    assert {results[0][each] for each in ("store_gb_per_s", "load_gb_per_s", "lookup_us")} == {None}
    assert "cannot be reached" in results[0]["error"]
    assert "Medians" not in command.out("bench", stack_file(tmp_path, tiers[0]), "--blocks", "4", status=1)
