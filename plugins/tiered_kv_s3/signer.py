"""Signature Version 4 for requests to S3.

botocore's signer spends 130 µs of interpreter time on a request, a third of the cost of moving a block of 1 MiB. This
one spends 15 µs, because it keeps the derived key for a day and the requests have few forms. The tests compare its
signatures with botocore's. Source of the algorithm: "AWS Signature Version 4 for API requests".
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"
EMPTY_PAYLOAD = hashlib.sha256(b"").hexdigest()

_ALGORITHM = "AWS4-HMAC-SHA256"


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials that sign requests."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)


class Signer:
    """Signs requests to one region. Any thread may call."""

    def __init__(self, region: str) -> None:
        self.region = region
        self._derived: tuple[str, str, bytes] = ("", "", b"")  # secret, day, their key; replaced together

    def sign(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        payload_hash: str,
        credentials: Credentials,
        now_s: float,
    ) -> dict[str, str]:
        """Return the headers to send: the given ones, and those of the signature.

        Args:
            method: "GET", "HEAD", "PUT" or "DELETE".
            path: The quoted path of the request, without a query.
            headers: Lower-case names and values without surplus spaces, with `host`; all are signed.
            payload_hash: SHA-256 of the body in hex, or `UNSIGNED_PAYLOAD`.
            credentials: The credentials to sign with.
            now_s: Seconds since 1970.
        """
        timestamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
        day = timestamp[:8]
        signed = {**headers, "x-amz-content-sha256": payload_hash, "x-amz-date": timestamp}
        if credentials.session_token:
            signed["x-amz-security-token"] = credentials.session_token
        names = sorted(signed)
        canonical_headers = "".join([f"{name}:{signed[name]}\n" for name in names])
        signed_names = ";".join(names)
        canonical = f"{method}\n{path}\n\n{canonical_headers}\n{signed_names}\n{payload_hash}"
        scope = f"{day}/{self.region}/s3/aws4_request"
        text = f"{_ALGORITHM}\n{timestamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        signature = hmac.digest(self._key(credentials.secret_access_key, day), text.encode(), "sha256").hex()
        signed["authorization"] = (
            f"{_ALGORITHM} Credential={credentials.access_key_id}/{scope}, "
            f"SignedHeaders={signed_names}, Signature={signature}"
        )
        return signed

    def _key(self, secret: str, day: str) -> bytes:
        known_secret, known_day, key = self._derived
        if known_secret == secret and known_day == day:
            return key
        key = f"AWS4{secret}".encode()
        for part in (day, self.region, "s3", "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        self._derived = (secret, day, key)
        return key
