"""Fuzzing of a stack's YAML: the result is a configuration or a `ConfigError`, which shows no secret."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.support.fuzzing import Target
from tiered_kv.errors import ConfigError
from tiered_kv.stack_config import StackConfig, load_config

SECRET = "hunter2-the-value-of-a-variable"
_ENVIRON = {"PASSWORD": SECRET, "SIZE": "1GiB", "KEY_ID": f"AKIA{SECRET}", "EMPTY": ""}
_ERROR_CHARACTERS_PER_BYTE = 200

_SEEDS = (
    b"""version: 1
namespace: {model: meta-llama/Llama-3.1-8B-Instruct, revision: main, dtype: bfloat16, tenant: default}
block: {bytes: 2MiB, tokens: 16}
primary: {capacity: 8GiB, policy: lru, prefault: no, promotion_hold: 2.5s}
secondary:
  - {type: nvme, path: ./kv-cache, capacity: 100GiB, direct: off, threads: 8}
  - {type: redis, url: "redis://localhost:6379/0", ttl: 1h, password: "${PASSWORD}"}
  - {type: s3, bucket: kv-blocks, prefix: prod, endpoint_url: "http://localhost:9000", access_key_id: "${KEY_ID}",
     secret_access_key: "${PASSWORD}"}
""",
    b"""# blocks of a test
namespace:
  model: "a \\u00e9 b"
  dtype: float16
block:
  bytes: 4096
primary:
  capacity: ${SIZE:-1MiB}
  numa_node: 0
secondary:
- type: fs
  path: /tmp/${EMPTY:-none}
  capacity: ${SIZE}
- type: memory
  name: second
  capacity: 0x100000
  codec: zstd
  store_budget: 1_000_000
  lookup_timeout: 250ms
""",
    b"""namespace: {model: m, dtype: fp8, tenant: "$$5"}
block: {bytes: 1:40, tokens: 2}
primary: {capacity: 1.5GB, policy: arc}
secondary: [{type: redis, mode: cluster, nodes: ["a:1", "b:2"], username: "${PASSWORD}", url: "rediss://u:${PASSWORD}@h"}]
""",
)
_WORDS = (
    b"${PASSWORD}", b"${", b"$$", b"!!python/object:os.system ", b"!!binary |\n", b"!!int ", b"!!float ",
    b"!!timestamp ", b"!!set ", b"!!omap ", b"&a ", b"*a", b"<<: ", b"? ", b"- ", b"---\n", b"...\n", b"%YAML 1.1\n",
    b"%TAG ! x\n", b"[", b"{", b"}", b"]", b"|+2\n", b">-\n", b"1:59:59", b"1:" * 30, b"0x" + b"f" * 40, b"0b1",
    b"0o7", b".inf", b".nan", b"2001-12-14t21:59:43.10-05:00", b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"\x85",
    b"\xe2\x80\xa8", b"~", b"= ", b"password: ", b"url: redis://user:${PASSWORD}@host/0?password=${PASSWORD}\n",
    b"type: ", b"secondary: ",
)  # fmt: skip


def make() -> Target:
    return Target("fuzz/stack-file", _SEEDS, _run, _WORDS)


def _run(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(prefix="tiered-kv-fuzz-", suffix=".yaml") as file:
        file.write(data)
        file.flush()
        message = ""
        config: StackConfig | None = None
        try:
            config = load_config(Path(file.name), environ=_ENVIRON)
        except ConfigError as error:
            message = f"{error}\n{error!r}\n{error.__cause__!r}"
    if config is None:
        assert SECRET not in message, f"a secret is shown: {message}"
        assert len(message) < 4096 + _ERROR_CHARACTERS_PER_BYTE * len(data), "the error is longer than what it is about"
        return
    assert SECRET not in repr(config), "a secret is in the configuration's text"
    assert config.primary_blocks >= 2
    assert len(config.identity.digest) == 16
