"""The tier's signatures equal botocore's."""

from __future__ import annotations

import datetime
from types import SimpleNamespace

import pytest

from tiered_kv_s3.connection import Endpoint
from tiered_kv_s3.signer import EMPTY_PAYLOAD, UNSIGNED_PAYLOAD, Credentials, Signer

botocore_auth = pytest.importorskip("botocore.auth", reason="boto3 is not installed")

NOW_S = 1_764_201_599.5  # half a second before a day ends
PUT_HEADERS = {
    "content-length": "1048704",
    "content-type": "application/octet-stream",
    "x-amz-storage-class": "ONEZONE_IA",
    "x-amz-server-side-encryption": "aws:kms",
    "x-amz-server-side-encryption-aws-kms-key-id": "arn:aws:kms:eu-west-1:1:key/a-b",
}


def botocore_signature(
    method: str, url: str, headers: dict[str, str], payload_hash: str, credentials: Credentials, region: str, at: float
) -> str:
    from botocore.awsrequest import AWSRequest

    frozen = SimpleNamespace(
        access_key=credentials.access_key_id,
        secret_key=credentials.secret_access_key,
        token=credentials.session_token or None,
    )
    signer = botocore_auth.S3SigV4Auth(frozen, "s3", region)
    signer.payload = lambda request: payload_hash
    request = AWSRequest(method=method, url=url, headers=headers)
    with pytest.MonkeyPatch.context() as patch:
        moment = datetime.datetime.fromtimestamp(at, datetime.UTC)
        patch.setattr(botocore_auth, "get_current_datetime", lambda: moment)
        signer.add_auth(request)
    return str(request.headers["Authorization"])


@pytest.mark.parametrize("token", ["", "a-session-token=="])
@pytest.mark.parametrize(("method", "headers"), [("GET", {}), ("HEAD", {}), ("DELETE", {}), ("PUT", PUT_HEADERS)])
@pytest.mark.parametrize(
    ("base", "name"),
    [
        ("https://bucket.s3.eu-west-1.amazonaws.com", "tiered-kv/00ff/blocks/0000/ab/abcdef"),
        ("http://127.0.0.1:9000/bucket", "it's (prod)!_~x.y/00ff/epoch"),
    ],
)
def test_signatures_equal_botocore_s(method: str, headers: dict[str, str], base: str, name: str, token: str) -> None:
    credentials = Credentials("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", token)
    endpoint = Endpoint.of_url(f"{base}/x")
    payload_hash = UNSIGNED_PAYLOAD if method == "PUT" else EMPTY_PAYLOAD
    signer = Signer("eu-west-1")
    url = f"{base}{endpoint.path_of(name).removeprefix(endpoint.base_path)}"
    for at in (NOW_S, NOW_S + 1, NOW_S):  # the derived key is kept for a day, and made again for another
        signed = signer.sign(
            method, endpoint.path_of(name), {"host": endpoint.authority, **headers}, payload_hash, credentials, at
        )
        expected = botocore_signature(method, url, headers, payload_hash, credentials, "eu-west-1", at)
        assert signed["authorization"] == expected


def test_another_secret_signs_with_another_key() -> None:
    signer = Signer("us-east-1")
    one, other = (
        signer.sign("GET", "/b/k", {"host": "h"}, EMPTY_PAYLOAD, Credentials("id", secret), NOW_S)
        for secret in ("secret-1", "secret-2")
    )
    assert one["authorization"] != other["authorization"]
    assert "secret" not in repr(Credentials("id", "secret-1", "secret-token"))


@pytest.mark.parametrize(
    ("url", "authority", "path"),
    [
        ("https://b.s3.us-east-1.amazonaws.com/x", "b.s3.us-east-1.amazonaws.com", "/a/b"),
        ("https://host:8443/b/x", "host:8443", "/b/a/b"),
        ("http://host:80/b/x", "host", "/b/a/b"),
        ("http://[::1]:9000/b/x", "[::1]:9000", "/b/a/b"),
    ],
)
def test_an_endpoint_has_a_host_header_and_paths(url: str, authority: str, path: str) -> None:
    endpoint = Endpoint.of_url(url)
    assert (endpoint.authority, endpoint.path_of("a/b")) == (authority, path)
