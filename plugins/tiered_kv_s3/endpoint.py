"""Where a bucket is, and how its server proves who it is."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Self
from urllib.parse import quote, urlsplit

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The server of a bucket.

    Args:
        host: Its name or address.
        port: Its port.
        is_tls: Whether it speaks TLS.
        base_path: What the path of every object begins with: the bucket, quoted, or nothing.
    """

    host: str
    port: int
    is_tls: bool
    base_path: str

    @classmethod
    def of_url(cls, url: str) -> Self:
        """Return the endpoint of the bucket that holds an object "x" at `url`."""
        parts = urlsplit(url)
        assert parts.hostname, "boto3 gives whole URLs"
        return cls(
            parts.hostname,
            parts.port or _PORTS[parts.scheme],
            parts.scheme == "https",
            parts.path.removesuffix("/x"),
        )

    @property
    def authority(self) -> str:
        """The value of the header `host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS["https" if self.is_tls else "http"] else f"{host}:{self.port}"

    def path_of(self, name: str) -> str:
        """Return the quoted path of an object."""
        return f"{self.base_path}/{quote(name, safe='/~')}"


def tls_context(ca_file: str | None) -> ssl.SSLContext:
    """Return what server certificates are verified with: the system's authorities, or those in `ca_file` alone.

    Raises:
        OSError: The file cannot be read, or holds no certificate.
    """
    context = ssl.create_default_context(cafile=ca_file)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
