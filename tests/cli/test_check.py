"""`tiered-kv check` as a preflight: its status is 0 only if a stack would open here, and store."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.command import Command
from tests.support.faulty import FourMethodTier
from tests.support.redis_servers import RedisServer
from tests.support.stacks import ReplaceModule, stack_file
from tests.support.status_server import StatusServer, response
from tests.support.zstd import MODULES
from tiered_kv.cli import check as command
from tiered_kv.errors import MissingExtraError
from tiered_kv.stack.open import open_stack
from tiered_kv.tiering.base import JobMetadata, JobResult


class FullTier(FourMethodTier):
    """Takes no block, as a disk without space."""

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._finished.append(JobResult(job_metadata.job_id, False, reason="no_space"))


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "check")


def test_a_tier_that_opens_and_stores_nothing_fails(tmp_path: Path, check: Command) -> None:
    file = stack_file(tmp_path, "type: 'tests.cli.test_check:FullTier'")
    found = check.json(file, status=1)["tiers"][1]
    assert (found["ok"], found["error"]) == (False, "it opens, and a block cannot be stored: no_space")


def test_a_redis_that_is_full_and_evicts_nothing_fails(tmp_path: Path, check: Command) -> None:
    with RedisServer(tmp_path / "redis", ("--maxmemory-policy", "noeviction")) as server:
        file = stack_file(tmp_path, f"type: redis, url: '{server.url}'")
        open_stack(file).close()  # so that the server has the epoch's mark, with which the tier opens
        server.call("CONFIG", "SET", "maxmemory", "1")
        found = check.json(file, status=1)["tiers"][1]
    assert (
        f"no_space; a write fails, so stores may fail too: the server 127.0.0.1:{server.port} has no" in found["error"]
    )
    assert "raise its 'maxmemory', or set its 'maxmemory-policy' to allkeys-lru" in found["error"]


def test_what_is_too_large_is_said_once_with_its_line_and_a_size_that_a_setting_takes(
    tmp_path: Path, check: Command
) -> None:
    file = stack_file(tmp_path, "type: redis, url: 'redis://127.0.0.1:1'", capacity="4PiB")
    shown = " ".join(check.out(file, status=1).split())
    assert shown.count("that this process has") == 1
    assert "cpu (cpu) FAILED line 3: primary.capacity is too much; see 'memory' below" in shown
    assert "memory FAILED line 3: the stack takes up to 4.0PiB of memory" in shown
    assert "redis (redis) FAILED line 5: the server 127.0.0.1:1 cannot" in shown
    (room,) = re.findall(r"primary.capacity has room for (\S+)", shown)
    assert re.fullmatch(r"\d{1,3}(\.(25|5|75))?[KMGT]iB", room)
    check.out(stack_file(tmp_path, capacity=room))


def test_an_address_that_is_taken_is_found(tmp_path: Path, check: Command) -> None:
    pytest.importorskip("prometheus_client")
    pytest.importorskip("zmq")
    with StatusServer(lambda: response(b"", "HTTP/1.1 404 Not Found")) as taken:
        address = f"127.0.0.1:{taken.port}"
        file = Path(stack_file(tmp_path, "type: memory, capacity: 1MiB"))
        extra = f'metrics: {{listen: "{address}"}}\nevents: {{publish: "tcp://{address}"}}\n'
        file.write_text(file.read_text() + extra)
        found = check.json(str(file), status=1)
    assert [each["setting"] for each in found["listens"]] == ["metrics.listen", "events.publish"]
    assert all("in use" in each["error"] and address in each["error"] for each in found["listens"])
    assert all(tier["ok"] for tier in found["tiers"])


@pytest.mark.parametrize("options", [(), ("--offline",)])
def test_a_missing_extra_of_what_listens_is_found(
    tmp_path: Path, check: Command, replace_module: ReplaceModule, options: tuple[str, ...]
) -> None:
    file = Path(stack_file(tmp_path, "type: memory, capacity: 1MiB"))
    more = 'metrics: {listen: "127.0.0.1:0"}\nevents: {publish: "tcp://127.0.0.1:*"}\n'
    file.write_text(file.read_text() + more)
    replace_module("prometheus_client", None)
    replace_module("zmq", None)
    found = check.json(str(file), *options, status=1)
    errors = [each["error"] for each in found["listens"]]
    assert [error[error.index("pip install") :] for error in errors] == [
        str(MissingExtraError("", name)).partition(": ")[2] for name in ("metrics", "events")
    ]


def test_offline_opens_nothing_and_finds_what_the_file_and_the_libraries_say(
    tmp_path: Path, check: Command, replace_module: ReplaceModule
) -> None:
    tiers = [f"type: nvme, path: {tmp_path}/kv, capacity: 1PiB, codec: zstd", "type: redis, url: 'redis://127.0.0.1:1'"]
    file = stack_file(tmp_path, *tiers, capacity="1PiB")
    found = check.json(file, "--offline")
    assert (found["ok"], found["offline"], found["limits"]) == (True, True, [])
    assert not (tmp_path / "kv").exists()
    for each in MODULES:
        replace_module(each, None)
    failed = check.json(file, "--offline", status=1)["tiers"][1]
    assert "zstd" in failed["error"]
    file = stack_file(tmp_path, capacity="1MiB, policy: 'no.module:Policy'")
    assert "FAILED" in check.out(file, "--offline", status=1)
    engines = tmp_path / "engine.yaml"
    engines.write_text(f"primary: {{capacity: 1GiB}}\nsecondary: [{{type: fs, path: {tmp_path}/kv, capacity: 1GiB}}]")
    assert check.json(str(engines), "--offline")["ok"]
    assert not (tmp_path / "kv").exists()


def test_what_cannot_be_deleted_again_is_a_warning(tmp_path: Path, check: Command) -> None:
    with RedisServer(tmp_path / "redis") as server:
        rights = ["+get", "+set", "+strlen", "+unlink"]
        server.call("ACL", "SETUSER", "tier", "on", ">secret", "~tkv1:*", *rights)
        url = f"redis://tier:secret@127.0.0.1:{server.port}"
        found = check.json(stack_file(tmp_path, f"type: redis, url: '{url}'"))["tiers"][1]
        assert found["details"]["warning"].startswith("the block that was stored here could not be deleted: the server")
        assert "+scan" in found["details"]["warning"]
        assert "secret" not in str(found)
        server.call("ACL", "SETUSER", "tier", "+scan", "+memory|usage")
        check.out(stack_file(tmp_path, f"type: redis, url: '{url}'"))
        names = server.call("KEYS", "*")
        assert names.count(b"tkv1:") == 2, "the mark and the readable form of the stack's own namespace"


def test_a_user_of_one_namespace_is_enough(tmp_path: Path, check: Command) -> None:
    with RedisServer(tmp_path / "redis") as server:
        file = stack_file(tmp_path, f"type: redis, url: 'redis://tier:secret@127.0.0.1:{server.port}'")
        digest = check.json(file, "--offline")["namespace_digest"]
        rights = ["+get", "+set", "+strlen", "+unlink"]
        server.call("ACL", "SETUSER", "tier", "on", ">secret", f"~tkv1:{digest}:*", *rights)
        assert check.json(file)["tiers"][1]["ok"]
        server.call("ACL", "SETUSER", "tier", "-set")
        assert "+set" in check.json(file, status=1)["tiers"][1]["error"]


@pytest.mark.parametrize(
    ("setting", "why", "shown"), [("auto", "", "yes"), ("auto", "why", "no: why"), ("off", "", "")]
)
def test_it_says_whether_shared_memory_gets_huge_pages(
    setting: str, why: str, shown: str, tmp_path: Path, check: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "refusal", lambda _: why)
    file = Path(stack_file(tmp_path, "type: memory, capacity: 1MiB"))
    file.write_text(file.read_text().replace("primary: {", f"primary: {{huge_pages: {setting}, "))
    assert check.json(str(file))["tiers"][0]["details"].get("shared_huge_pages", "") == shown
