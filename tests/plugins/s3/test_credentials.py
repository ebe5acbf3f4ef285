"""Credentials of an s3 tier: read again when the server refuses them, and refused when they have white space."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from tests.support.fake_s3 import FakeS3, OpenRig, Request, error, open_rig, server
from tiered_kv.testing.rig import make_keys
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_s3 import access
from tiered_kv_s3.settings import S3Settings

pytest.importorskip("boto3", reason="boto3 is not installed")

__all__ = ["open_rig", "server"]

PROFILE: dict[str, object] = {"profile": "kv", "access_key_id": None, "secret_access_key": None}


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file for the credentials of `PROFILE`; the environment has none."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    return file


def _key_of(request: Request) -> str:
    return request.headers["authorization"].partition("credential=")[2].partition("/")[0]


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "InvalidToken"])
def test_a_credentials_file_is_read_again_when_the_server_refuses_the_old_key(
    server: FakeS3, open_rig: OpenRig, profile: Path, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    text = "[kv]\naws_access_key_id = {0}\naws_secret_access_key = a-secret\n"
    profile.write_text(text.format("the-first"))
    valid = ["the-first"]
    server.reply = lambda request: None if _key_of(request) in valid else error(403, code)
    rig = open_rig(**PROFILE)
    assert rig.store(make_keys(1, "before")).success
    valid[0] = "the-second"
    profile.write_text(text.format("the-second"))
    assert rig.store(make_keys(1, "after")).success
    assert "they were read again, and changed" in caplog.text
    assert "a-secret" not in caplog.text


def test_credentials_that_stay_refused_are_read_at_a_bounded_rate(
    server: FakeS3, open_rig: OpenRig, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile.write_text("[kv]\naws_access_key_id = the-first\naws_secret_access_key = a-secret\n")
    opened: list[object] = []
    open_session = access.BucketAccess._open_session

    def open_it(self: access.BucketAccess) -> object:
        opened.append(self)
        return open_session(self)

    monkeypatch.setattr(access.BucketAccess, "_open_session", open_it)
    server.reply = lambda request: error(403, "AccessDenied")
    rig = open_rig(**PROFILE)
    for number in range(20):
        assert rig.store(make_keys(1, f"{number}")).reason == "denied"
    assert len(opened) <= 3, "one at the opening, and one every five seconds at most"


@pytest.mark.parametrize("stray", ["\n", " ", "\ufeff", "\x00", "\t", "\u200b"])
@pytest.mark.parametrize("setting", ["access_key_id", "secret_access_key"])
def test_white_space_in_a_credential_is_an_error_that_names_the_setting(setting: str, stray: str) -> None:
    entry = {"bucket": "kv-blocks", "access_key_id": "an-id", "secret_access_key": "a-secret"}
    S3Settings.model_validate(entry)
    for wrong in (entry[setting] + stray, stray + entry[setting], "in" + stray + "side"):
        with pytest.raises(ValidationError, match=rf"(?s){setting}.*has white space or a control character") as raised:
            S3Settings.model_validate({**entry, setting: SecretStr(wrong)})
        assert entry[setting] not in str(raised.value)


def test_white_space_in_the_environment_s_credentials_is_named_and_not_sent(
    server: FakeS3, open_rig: OpenRig, profile: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret\n")
    rig = open_rig(**{**PROFILE, "profile": None})
    assert not rig.store(make_keys(1)).success
    assert "the provider 'env' has white space" in caplog.text
    assert not server.seen


@pytest.mark.parametrize("password", ["a-secret\n", "\ufeffa-secret", " a-secret", "a\tsecret"])
def test_a_password_of_redis_with_a_line_s_end_is_an_error_that_names_the_setting(password: str) -> None:
    with pytest.raises(ValidationError, match=r"(?s)password.*white space or a control character") as raised:
        RedisSettings.model_validate({"host": "a-server", "password": password})
    assert "a-secret" not in str(raised.value)
    RedisSettings.model_validate({"host": "a-server", "password": "two words"})
