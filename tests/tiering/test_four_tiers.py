"""The example of four tiers under a replay: each has hits, and a Redis that was killed and is empty is used again.

Real processes throughout: the command, a redis-server and moto's server.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pytest

from tiered_kv.counters import count_of
from tiered_kv.testing.redis_servers import RedisServer, free_port
from tiered_kv.testing.s3_servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server, moto_bucket, moto_server
from tiered_kv.testing.waiting import wait_until
from tiered_kv.workload.generator import ChatWorkload
from tiered_kv.workload.request import Request
from tiered_kv.workload.trace import read_trace

__all__ = ["moto_bucket", "moto_server"]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "all_tiers.yaml"
TRACE = ROOT.parent / "shared" / "traces" / "conversation_trace.jsonl"
COMMAND = [sys.executable, "-c", "import sys; from tiered_kv.cli import main; sys.exit(main())", "replay"]
REQUESTS = 1500
TIERS = ("cpu", "nvme", "redis", "s3")
REDIS_OPTIONS = ("--maxmemory", "48mb", "--maxmemory-policy", "allkeys-lru")
SETS_BEFORE = 300
"""How often Redis is told at least to store a block, while half of the requests are played, on any machine."""
WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Workload:
    """What is replayed.

    Args:
        arguments: Of the command.
        requests: The same requests.
    """

    arguments: tuple[str, ...]
    requests: Callable[[], Iterator[Request]]

    def lines(self) -> list[str]:
        """Return the requests as the lines of a trace."""
        names = {"timestamp_ms": "timestamp", "input_length": "input_length", "output_length": "output_length"}
        return [
            json.dumps({**{new: getattr(each, old) for old, new in names.items()}, "hash_ids": each.hash_ids}) + "\n"
            for each in itertools.islice(self.requests(), REQUESTS)
        ]


CHATS = Workload(("--requests", str(REQUESTS), "--active-chats", "150"), ChatWorkload(active_chats=150).requests)
CONVERSATIONS = Workload(("--requests", str(REQUESTS), "--trace", str(TRACE)), partial(read_trace, TRACE))


class Replays:
    """The example's servers, and runs of the command on it, one after the other in one directory.

    Args:
        path: The directory.
        redis: A server that runs.
        s3: The same.
        bucket: Its bucket.
    """

    def __init__(self, path: Path, redis: RedisServer, s3: S3Server, bucket: str) -> None:
        self.redis = redis
        self._path = path
        self._environment = {
            **os.environ,
            "REDIS_URL": f"{redis.url}/0",
            "S3_ENDPOINT": s3.url,
            "S3_BUCKET": bucket,
            "S3_KEY_ID": ACCESS_KEY_ID,
            "S3_SECRET": SECRET_ACCESS_KEY,
        }

    @contextmanager
    def begin(self, arguments: Sequence[str], stack: Path = EXAMPLE) -> Iterator[subprocess.Popen[str]]:
        """Start a run; it is killed at the end of the block if it is still under way."""
        with subprocess.Popen(
            [*COMMAND, str(stack), "--json", *arguments],
            cwd=self._path,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def finish(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """Wait for the end of a run and return its report, which must say that no byte was wrong."""
        output, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, errors
        assert SECRET_ACCESS_KEY not in output + errors
        report: dict[str, Any] = json.loads(output)
        assert report["corrupt_blocks"] == 0
        assert report["verified_blocks"] == sum(report["hits"].values()) > 0
        assert report["drained"]
        return report

    def redis_calls(self, command: str) -> int:
        """Return how often the server, as it runs now, has been given a command."""
        found = re.search(rb"cmdstat_%s:calls=(\d+)" % command.encode(), self.redis.call("INFO", "commandstats"))
        return int(found[1]) if found else 0


@pytest.fixture
def replays(tmp_path: Path, moto_server: S3Server, moto_bucket: str) -> Iterator[Replays]:
    pytest.importorskip("redis", reason="redis-py is not installed")
    directory = tmp_path / "redis"
    directory.mkdir()
    redis = RedisServer(directory, REDIS_OPTIONS)
    try:
        redis.start()
        yield Replays(tmp_path, redis, moto_server, moto_bucket)
    finally:
        redis.kill()


@contextmanager
def written_to(pipe: Path, reader: subprocess.Popen[str]) -> Iterator[TextIO]:
    """Open a pipe for writing once the reader has it open; whoever writes to one without a reader gets an error."""
    opened: list[int] = []

    def is_open() -> bool:
        assert reader.poll() is None, "it has ended"
        with contextlib.suppress(OSError):  # ENXIO: it has not come so far
            opened.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        return bool(opened)

    wait_until(is_open, WAIT_S, what="the pipe's reader")
    os.set_blocking(opened[0], True)
    with open(opened[0], "w") as file:
        yield file


@contextmanager
def ended_in_time(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill a process that takes longer than `WAIT_S`: who writes to one that hangs waits for ever."""
    timer = threading.Timer(WAIT_S, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@pytest.fixture(params=["conversations", "chats"])
def workload(request: pytest.FixtureRequest) -> Workload:
    if request.param == "chats":
        return CHATS
    if not TRACE.exists():
        pytest.skip(f"there is no {TRACE}")
    return CONVERSATIONS


@pytest.mark.slow
def test_a_replay_has_hits_in_each_of_the_four_tiers(replays: Replays, workload: Workload) -> None:
    with replays.begin(workload.arguments) as process:
        report = replays.finish(process)
    assert report["requests"] == REQUESTS
    assert tuple(report["hits"]) == TIERS
    assert all(report["hits"].values()), report["hits"]
    assert not any(count_of(report["tiers"][name]["counters"], "tier", "corrupt_blocks_total") for name in TIERS)


@pytest.mark.slow
def test_a_redis_that_is_killed_halfway_and_comes_back_empty_is_used_again(
    replays: Replays, workload: Workload, tmp_path: Path
) -> None:
    # A fast machine is done with all requests in a few seconds: those of the breaker would be most of them.
    stack = tmp_path / "stack.yaml"
    stack.write_text(EXAMPLE.read_text().replace("    ttl: 1h\n", "    ttl: 1h\n    breaker_cooldown: 50ms\n"))
    assert "cooldown" in stack.read_text()
    # The second half of the requests comes through the pipe once Redis is back, however long that takes.
    pipe = tmp_path / "requests"
    os.mkfifo(pipe)
    lines = workload.lines()
    replay = ("--requests", str(REQUESTS), "--trace", str(pipe))
    with replays.begin(replay, stack) as process, ended_in_time(process):
        # If it ends early, `finish` has what it said.
        with contextlib.suppress(BrokenPipeError), written_to(pipe, process) as requests:
            requests.writelines(lines[: REQUESTS // 2])
            requests.flush()
            wait_until(lambda: replays.redis_calls("set") > SETS_BEFORE, WAIT_S, what="the use of Redis")
            replays.redis.restart()
            requests.writelines(lines[REQUESTS // 2 :])
        report = replays.finish(process)
    assert report["requests"] == REQUESTS
    # Whether a store fails is up to the moment: between two of them a tier connects again, and nobody notices.
    # A half-open breaker lets one job through, of a few dozen blocks. So many are stored only because it has closed.
    assert replays.redis_calls("set") > 500, report["tiers"]["redis"]["counters"]
    # A block is asked for only where the server says it has it, and it had nothing when it came back.
    assert replays.redis_calls("get") > 0, report["tiers"]["redis"]["counters"]


@pytest.mark.slow
def test_the_commands_in_the_quickstart_run_the_example(tmp_path: Path) -> None:
    scripts = Path(sys.executable).parent
    path = f"{scripts}:{os.environ['PATH']}"
    missing = [
        name for name in ("redis-server", "moto_server", "tiered-kv", "curl") if shutil.which(name, path=path) is None
    ]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    page = (ROOT / "docs" / "tutorial" / "quickstart.md").read_text()
    commands = page.partition("<!-- all tiers -->\n```sh\n")[2].partition("```")[0]
    for name, ours in (("6379", str(free_port())), ("9000", str(free_port())), ("examples/", f"{ROOT}/examples/")):
        commands = commands.replace(name, ours)
    with subprocess.Popen(
        ["bash", "-e", "-c", commands.replace("--requests 1500", "--requests 200") + "wait\n"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=WAIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the servers too, if it did not come to its end
    assert "corrupt_blocks" in output, errors
    assert all(re.search(rf"^ {name} +\d", output, re.MULTILINE) for name in (*TIERS, "misses")), output
