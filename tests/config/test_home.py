"""A `~` in a path is the home directory, or an error: never a directory that is called "~"."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tiered_kv.cli import main
from tiered_kv.config.settings import TierSettings
from tiered_kv.errors import ConfigError
from tiered_kv.hooks import tier_settings
from tiered_kv.stack_config import load_config

ENTRIES: list[tuple[str, dict[str, object]]] = [
    ("path", {"type": "nvme", "capacity": "1GiB"}),
    ("path", {"type": "fs", "capacity": "1GiB"}),
    ("socket", {"type": "redis"}),
    ("tls_ca", {"type": "redis", "host": "h", "tls": True}),
    ("tls_cert", {"type": "redis", "host": "h", "tls": True}),
    ("tls_key", {"type": "redis", "host": "h", "tls": True, "tls_cert": "/c"}),
    ("ca_file", {"type": "s3", "bucket": "blocks"}),
]


def settings_of(name: str, entry: dict[str, object], path: str) -> TierSettings:
    return tier_settings({**entry, name: path})


@pytest.mark.parametrize(("name", "entry"), ENTRIES, ids=[f"{entry['type']}.{name}" for name, entry in ENTRIES])
def test_every_path_of_a_tier_takes_a_home_and_refuses_one_that_is_not_there(
    name: str, entry: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    assert getattr(settings_of(name, entry, "~/kv"), name) == "/home/alice/kv"
    assert getattr(settings_of(name, entry, "./~kv"), name) == "./~kv"
    with pytest.raises(ConfigError, match=rf"{name}: expected a path .*there is no such user; write the whole path"):
        settings_of(name, entry, "~nobody-of-this-name/kv")
    monkeypatch.setenv("HOME", "")
    with pytest.raises(ConfigError, match=rf"{name}: expected a path .*no home directory"):
        settings_of(name, entry, "~/kv")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 987654)  # as in a container: the user has no entry in /etc/passwd
    with pytest.raises(ConfigError, match=rf"{name}: expected a path .*no home directory"):
        settings_of(name, entry, "~")


def test_key_files_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "")
    entry = {"type": "memory", "capacity": "1MiB", "codec": "aes-256-gcm", "encryption": {"key_files": {1: "~/key"}}}
    with pytest.raises(ConfigError, match=r"encryption\.key_files\.1: expected a path .*no home directory"):
        tier_settings(entry)


def test_the_command_expands_what_the_shell_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0, "input_length": 16, "output_length": 1, "hash_ids": [1]}\n')
    assert main(["simulate", "--trace=~/trace.jsonl", "--capacity=8", "--json"]) == 0
    monkeypatch.setenv("HOME", "")
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", "--trace=~/trace.jsonl"])
    assert "no home directory" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"~/stack\.yaml: the stack's file cannot be read: .*no home directory"):
        load_config("~/stack.yaml")
    assert "~" not in os.listdir(".")
