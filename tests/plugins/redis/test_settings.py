"""The YAML entry of a redis tier: accepted values, error messages, and secrets."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from tests.plugins.conftest import OpenRedis
from tests.support.redis_servers import PASSWORD, RedisServer
from tiered_kv.config.validation import validate
from tiered_kv.errors import ConfigError, TierUnavailableError
from tiered_kv.testing.rig import make_keys

pytest.importorskip("redis", reason="redis-py is not installed")

from tiered_kv_redis.settings import Address, RedisSettings

SECRET = "pl4nted-s3cret"


def read(**entry: object) -> RedisSettings:
    return RedisSettings.model_validate({"type": "redis", **entry})


def test_a_url_says_host_port_database_tls_user_and_password() -> None:
    settings = read(url="rediss://some%40one:p%3Aw@example.org:7000/3")
    assert settings.addresses == (Address("example.org", 7000),)
    assert (settings.tls, settings.db) == (True, 3)
    assert settings.username is not None
    assert settings.username.get_secret_value() == "some@one"
    assert settings.password is not None
    assert settings.password.get_secret_value() == "p:w"
    assert settings.url == "rediss://example.org:7000/3"
    assert read(url="unix:///run/redis.sock").socket == "/run/redis.sock"
    assert read(url="redis://[::1]:7000").addresses == (Address("::1", 7000),)
    assert read(mode="cluster", nodes=["[::1]:7000", "b:1"]).addresses == (Address("::1", 7000), Address("b", 1))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, "expected 'url'"),
        ({"url": "http://localhost"}, "names no server"),
        ({"url": "redis://localhost/x"}, "number of a database"),
        ({"url": "redis://localhost?db=1"}, "may not have a query"),
        ({"url": "redis://localhost:99999"}, "cannot be read"),
        ({"url": "redis://localhost", "host": "other"}, "both say it"),
        ({"url": "redis://:a@localhost", "password": "b"}, "both say it"),
        ({"host": "a", "socket": "/b"}, "Unix socket"),
        ({"host": "a", "nodes": ["b:1"]}, "'nodes' is for"),
        ({"mode": "cluster"}, "needs 'nodes'"),
        ({"mode": "cluster", "nodes": ["b"]}, "host:port"),
        ({"mode": "cluster", "url": "redis://a/2"}, "no database but 0"),
        ({"mode": "sentinel", "nodes": ["b:1"]}, "belong together"),
        ({"host": "a", "tls_ca": "ca.pem"}, "need 'tls: true'"),
        ({"host": "a", "tls": True, "tls_key": "key.pem"}, "without 'tls_cert'"),
        ({"socket": "unix:///run/redis.sock"}, "'socket' is a path"),
        ({"host": "a", "connections": 0}, "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_used_is_said(entry: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**entry)


def test_a_wrong_password_is_an_error_that_does_not_repeat_it(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture, open_redis: OpenRedis
) -> None:
    caplog.set_level(logging.DEBUG)
    redis_server.call("CONFIG", "SET", "requirepass", "the right one")
    for entry in ({"password": SECRET}, {"username": "someone", "password": SECRET}, {}):
        with pytest.raises(TierUnavailableError, match="refuses the user or password") as raised:
            open_redis(url=redis_server.url, **entry)
        shown = f"{raised.value!r} {raised.value} {raised.value.__cause__!r} {raised.value.__context__!r}"
        assert SECRET not in shown
    assert SECRET not in caplog.text


def test_a_user_that_may_not_do_what_is_needed_is_an_error(redis_server: RedisServer, open_redis: OpenRedis) -> None:
    redis_server.call("ACL", "SETUSER", "reader", "on", f">{SECRET}", "~*", "+ping", "+client")
    with pytest.raises(TierUnavailableError, match="does not permit"):
        open_redis(url=redis_server.url, username="reader", password=SECRET)


def test_a_capacity_is_an_unknown_key_and_the_message_names_the_server_s_limit() -> None:
    with pytest.raises(ConfigError, match=r"capacity: unknown key, .*; the limit is the server's 'maxmemory'"):
        validate(RedisSettings, {"type": "redis", "url": "redis://localhost", "capacity": "8GiB"})


@pytest.mark.parametrize(
    ("memory", "policy", "warning"),
    [("0", "allkeys-lru", "maxmemory is 0"), ("64mb", "noeviction", "noeviction"), ("64mb", "allkeys-lru", None)],
)
def test_describe_shows_the_server_s_limit_and_warns_where_there_is_none(
    redis_server: RedisServer, memory: str, policy: str, warning: str | None, open_redis: OpenRedis
) -> None:
    redis_server.call("CONFIG", "SET", "maxmemory", memory, "maxmemory-policy", policy)
    rig = open_redis(url=redis_server.url)
    described = rig.tier.describe()
    assert (described["maxmemory"], described["maxmemory_policy"]) == ("64MiB" if memory == "64mb" else "0B", policy)
    assert (warning is None) == ("warning" not in described)
    assert str(warning or "") in str(described.get("warning", ""))


def test_the_commands_that_the_page_names_are_enough(redis_server: RedisServer, open_redis: OpenRedis) -> None:
    rights = ["+get", "+set", "+strlen", "+unlink"]
    redis_server.call("ACL", "SETUSER", "tier", "on", f">{SECRET}", "~tkv1:*", *rights)
    rig = open_redis(url=redis_server.url, username="tier", password=SECRET)
    keys = make_keys(4)
    assert rig.store(keys).success
    assert rig.load(keys) == set(keys)
    assert rig.tier.reset_cache()
    assert rig.store(keys).success
    assert str(rig.tier.describe()["maxmemory"]).startswith("unknown"), "INFO is not among them"


def test_the_error_says_why_a_certificate_is_refused(tls_redis_server: RedisServer, open_redis: OpenRedis) -> None:
    with pytest.raises(
        TierUnavailableError, match=r"certificate.* \((self-signed|unable to get local issuer).*set 'tls_ca'"
    ):
        open_redis(url=tls_redis_server.url, password=PASSWORD)


def test_a_certificate_or_key_that_cannot_be_used_is_said_when_it_is_opened(
    tls_redis_server: RedisServer, tmp_path: Path, open_redis: OpenRedis
) -> None:
    tls = tls_redis_server.tls
    assert tls is not None
    good = {"tls_ca": str(tls.ca), "tls_cert": str(tls.cert), "tls_key": str(tls.key)}
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no PEM")
    for name in good:
        for wrong, why in ((tmp_path / "absent.pem", "No such file"), (garbage, "not usable")):
            with pytest.raises(ConfigError, match=f"'{name}': expected .*{wrong}.*{why}"):
                open_redis(url=tls_redis_server.url, password=PASSWORD, **{**good, name: str(wrong)})
    with pytest.raises(ConfigError, match="'tls_key': expected"):  # a key, but another one's
        open_redis(url=tls_redis_server.url, password=PASSWORD, **{**good, "tls_key": str(tls.ca.with_suffix(".key"))})


def test_an_encrypted_key_needs_its_password_and_no_terminal_is_asked(
    tls_redis_server: RedisServer, tmp_path: Path, open_redis: OpenRedis
) -> None:
    tls = tls_redis_server.tls
    assert tls is not None
    locked = tmp_path / "locked.pem"
    key = load_pem_private_key(tls.key.read_bytes(), None)
    locked.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(SECRET.encode())))
    entry = {"tls_ca": str(tls.ca), "tls_cert": str(tls.cert), "tls_key": str(locked), "password": PASSWORD}
    for wrong in ({}, {"tls_key_password": "another"}):
        with pytest.raises(ConfigError, match="'tls_key_password'"):
            open_redis(url=tls_redis_server.url, **entry, **wrong)
    rig = open_redis(url=tls_redis_server.url, **entry, tls_key_password=SECRET)
    assert rig.store(make_keys(2)).success


def test_the_entries_on_the_page_are_accepted() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "redis.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    for entry in yaml.safe_load(block)["secondary"]:
        assert RedisSettings.model_validate(entry).addresses
