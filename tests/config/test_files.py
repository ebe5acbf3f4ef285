"""Files that a configuration names: keys, which no refusal shows, paths with a `~`; and the lines that errors name."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from tests.support.command import Command
from tiered_kv import ConfigError, load_config
from tiered_kv.cli.main import main
from tiered_kv.config.entries import tier_settings
from tiered_kv.config.secrets import KEY_FILE_BYTES_MAX, parse_key, read_key_file
from tiered_kv.config.settings import TierSettings
from tiered_kv.workload.simulation import load_prices

KEY = bytes(range(200, 232))
FORMS = {
    "hex": KEY.hex(),
    "capital hex": KEY.hex().upper(),
}
NO_KEYS = [
    "",
    "secret-text",
    KEY.hex()[:-1],
    KEY.hex() + "0",
    KEY.hex()[:-1] + "g",
    base64.b64encode(KEY).decode(),
    f"{KEY.hex()[:32]}\n{KEY.hex()[32:]}",
]


@pytest.mark.parametrize("form", FORMS)
def test_a_key_is_hexadecimal_with_white_space_around_it(form: str) -> None:
    assert parse_key(FORMS[form]) == KEY
    assert parse_key(f" \t{FORMS[form]}\r\n") == KEY
    assert parse_key(f"\u00a0{FORMS[form]}\x1c") == KEY


@pytest.mark.parametrize("text", NO_KEYS)
def test_an_invalid_key_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a key: 32 bytes as 64 hexadecimal digits, as `openssl") as caught:
        parse_key(text)
    assert not text.strip() or text.strip() not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "name.key"
    path.touch(mode=0o600)
    path.write_text(f"{KEY.hex()}\n")
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_of_the_user_is_read_also_by_a_link(key_file: Path, tmp_path: Path, mode: int) -> None:
    key_file.chmod(mode)
    assert read_key_file(key_file) == KEY
    (tmp_path / "link").symlink_to(key_file)
    assert read_key_file(tmp_path / "link") == KEY


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_root_that_a_group_may_read_is_read(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So Kubernetes mounts a secret into a pod with an fsGroup."""
    key_file.chmod(0o440)
    os.chown(key_file, 0, 2000)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert read_key_file(key_file) == KEY
    for mode in (0o460, 0o444):
        key_file.chmod(mode)
        with pytest.raises(ConfigError, match="belongs to user 0, and this process is user 1000"):
            read_key_file(key_file)


@pytest.mark.parametrize("mode", [0o604, 0o660, 0o610, 0o602, 0o601])
def test_a_file_that_others_may_use_is_refused(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"the key file has mode {mode:04o}: .*chmod 600"):
        read_key_file(key_file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_user_s_file_is_refused(key_file: Path) -> None:
    os.chown(key_file, 12345, -1)
    with pytest.raises(ConfigError, match=r"belongs to user 12345, and this process is user 0"):
        read_key_file(key_file)


@pytest.mark.parametrize(
    "content", [b"", b"secret-text", b"\xff" * 32, KEY.hex().encode() + b"\n" + KEY.hex().encode(), KEY]
)
def test_a_file_without_a_key_is_refused_and_its_content_not_shown(key_file: Path, content: bytes) -> None:
    key_file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"the key file holds no key: expected a key") as caught:
        read_key_file(key_file)
    for shown in (content.decode("latin-1"), content.decode("ascii", "replace"), content.hex()):
        assert not content or shown not in str(caught.value)


def test_a_large_file_is_refused(key_file: Path) -> None:
    key_file.write_text(KEY.hex() + "\n" * KEY_FILE_BYTES_MAX)
    with pytest.raises(ConfigError, match="larger than 1KiB"):
        read_key_file(key_file)


def test_a_path_of_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, why in (("pipe", "no regular file"), ("", "no regular file"), ("missing", "cannot be opened: No such")):
        with pytest.raises(ConfigError, match=why):
            read_key_file(tmp_path / path)
    with pytest.raises(ConfigError, match="this is no path"):
        read_key_file("a\0b")
    with pytest.raises(ConfigError, match="the key file cannot be opened") as caught:
        read_key_file(KEY.hex())
    assert KEY.hex() not in str(caught.value), "a key in place of a path"


# A `~` in a path is the home directory, or an error: never a directory that is called "~".


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


# Errors about a file: the line of each setting, and what to write instead.

STACK = """\
namespace: {model: m}
block:
  bytes: 4096
primary:
  capacity: 1MiB
secondary:
  - type: nvme
    path: /tmp/kv
    capacity: 64MiB
  - {type: memory, capacity: 1MiB}
"""


def error_of(directory: Path, text: str) -> str:
    file = directory / "stack.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    return str(raised.value).removeprefix(str(file))


@pytest.mark.parametrize(
    ("found", "written", "line", "location"),
    [
        ("bytes: 4096", "bytes: lots", 3, "block.bytes"),
        ("capacity: 64MiB", "capacity: -1", 9, "secondary.0.capacity"),
        ("    capacity: 64MiB\n", "", 7, "secondary.0.capacity"),  # the entry that lacks it
        ("path: /tmp/kv", "pth: /tmp/kv", 8, "secondary.0.pth"),
        ("type: memory", "type: memry", 10, "secondary.1.type"),
        ("type: memory", "type: nvme, path: x", 10, "secondary.1.name"),
        ("block:\n  bytes: 4096\n", "", 1, "block"),
        ("capacity: 1MiB\ns", "capacity: 4KiB\ns", 5, "primary.capacity"),
        ("capacity: 1MiB\ns", "capacity: ${NONESUCH}\ns", 5, "primary.capacity"),
        ("model: m", "model: m, 1: 2", 1, "namespace.1"),
    ],
)
def test_an_error_names_its_line(tmp_path: Path, found: str, written: str, line: int, location: str) -> None:
    text = STACK.replace(found, written, 1)
    assert text != STACK
    places = error_of(tmp_path, text)
    assert f"{line}: {location}: " in places


def test_several_errors_name_their_lines(tmp_path: Path) -> None:
    lines = error_of(tmp_path, STACK.replace("4096", "x").replace("1MiB\n", "y\n", 1)).splitlines()
    assert [line.partition(": expected")[0] for line in lines] == [
        ": 2 settings cannot be used:",
        "  line 3: block.bytes",
        "  line 5: primary.capacity",
    ]


def test_the_lines_of_prices_are_named(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text("currency: EUR\ntiers:\n  cpu: {gib: 1}\n")
    with pytest.raises(ConfigError, match=r"prices\.yaml:3: tiers\.cpu\.gib: unknown key"):
        load_prices(tmp_path / "prices.yaml", ["cpu"])


def test_an_error_after_the_file_was_read_names_its_line_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stack.yaml"
    file.write_text(STACK.replace("capacity: 1MiB\n", "capacity: 1MiB\n  policy: tests.nonesuch:Policy\n", 1))
    error = Command(capsys, "replay").err(str(file))
    assert error.startswith(f"error: {file}:6: primary.policy: the policy 'tests.nonesuch:Policy' cannot be made")


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        (
            'metrics: {listen: "9464"}',
            "metrics.listen: expected a text such as 127.0.0.1:9464 or [::1]:9464, found '9464'",
        ),
        ("audit_action: stopp", "expected 'report' or 'stop', found 'stopp' (did you mean 'stop'?)"),
        ("metrcs: {}", "metrcs: unknown key, with the value {} (did you mean 'metrics'?)"),
        ("events: {publish: 'localhost'}", "expected a text such as tcp://127.0.0.1:5557 or ipc:///run/kv-events"),
    ],
)
def test_an_error_says_what_to_write(tmp_path: Path, added: str, problem: str) -> None:
    assert problem in error_of(tmp_path, f"{STACK}{added}\n")


def test_a_wrong_policy_or_codec_gets_the_nearest_right_one(tmp_path: Path) -> None:
    policy = error_of(tmp_path, STACK.replace("1MiB\n", "1MiB\n  policy: ark\n", 1))
    assert policy.startswith(":6: primary.policy: expected lru, arc, density, or 'module:Class' of a policy")
    assert policy.endswith(" (did you mean 'arc'?), found 'ark'")
    codec = error_of(tmp_path, STACK.replace("type: memory", "type: memory, codec: zstandard"))
    assert codec.endswith("found 'zstandard' (did you mean 'zstd'?)")
