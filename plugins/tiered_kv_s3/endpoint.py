"""The address of a bucket's server, and of the proxy in front of it."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import quote, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Proxy:
    host: str
    port: int
    authorization: str = field(default="", repr=False)

    @classmethod
    def of_environment(cls, scheme: str, host: str) -> Self | None:
        """Return the proxy that HTTP_PROXY, HTTPS_PROXY and NO_PROXY set for a server, if any.

        Raises:
            ValueError: The value is no URL of an HTTP proxy.
        """
        url = getproxies().get(scheme, "")
        if not url or proxy_bypass(host):
            return None
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{scheme.upper()}_PROXY is no URL of an HTTP proxy")
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else ""
        header = f"Proxy-Authorization: Basic {b64encode(secret.encode()).decode()}\r\n" if secret else ""
        return cls(parts.hostname, parts.port or _PORTS["http"], header)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The server of a bucket."""

    host: str
    port: int
    is_tls: bool
    base_path: str  # before the name of every object: the quoted bucket, or nothing
    proxy: Proxy | None = None

    @classmethod
    def of_url(cls, url: str) -> Self:
        """Return the endpoint of the bucket that has an object "x" at `url`; raises as `Proxy.of_environment`."""
        parts = urlsplit(url)
        assert parts.hostname, "boto3 gives whole URLs"
        return cls(
            parts.hostname,
            parts.port or _PORTS[parts.scheme],
            parts.scheme == "https",
            parts.path.removesuffix("/x"),
            Proxy.of_environment(parts.scheme, parts.hostname),
        )

    @property
    def address(self) -> str:
        """Host and port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def authority(self) -> str:
        """The value of the header `host`, without the scheme's own port."""
        return self.address.removesuffix(":443" if self.is_tls else ":80")

    def path_of(self, name: str) -> str:
        return f"{self.base_path}/{quote(name, safe='/~')}"
