"""The example of four tiers under a replay, with real servers: each tier has hits."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tiered_kv.counters import count_of
from tiered_kv.testing.redis_servers import RedisServer
from tiered_kv.testing.s3_servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server, moto_bucket, moto_server
from tiered_kv.testing.server_process import free_port

__all__ = ["moto_bucket", "moto_server"]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "all_tiers.yaml"
COMMAND = [sys.executable, "-c", "import sys; from tiered_kv.cli import main; sys.exit(main())", "replay"]
ARGUMENTS = ("--requests", "1500", "--active-chats", "150")
TIERS = ("cpu", "nvme", "redis", "s3")
WAIT_S = 300.0


@pytest.mark.slow
def test_a_replay_has_hits_in_each_of_the_four_tiers(tmp_path: Path, moto_server: S3Server, moto_bucket: str) -> None:
    pytest.importorskip("redis", reason="redis-py is not installed")
    directory = tmp_path / "redis"
    directory.mkdir()
    redis = RedisServer(directory, ("--maxmemory", "48mb", "--maxmemory-policy", "allkeys-lru"))
    try:
        redis.start()
        done = subprocess.run(
            [*COMMAND, str(EXAMPLE), "--json", *ARGUMENTS],
            cwd=tmp_path,
            env={
                **os.environ,
                "REDIS_URL": f"{redis.url}/0",
                "S3_ENDPOINT": moto_server.url,
                "S3_BUCKET": moto_bucket,
                "S3_KEY_ID": ACCESS_KEY_ID,
                "S3_SECRET": SECRET_ACCESS_KEY,
            },
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
    finally:
        redis.kill()
    assert done.returncode == 0, done.stderr
    assert SECRET_ACCESS_KEY not in done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["drained"]
    assert report["requests"] == 1500
    assert tuple(report["hits"]) == TIERS
    assert all(report["hits"].values()), report["hits"]
    assert report["corrupt_blocks"] == 0
    assert report["verified_blocks"] == sum(report["hits"].values())
    assert not any(count_of(report["tiers"][name]["counters"], "tier", "corrupt_blocks_total") for name in TIERS)


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
