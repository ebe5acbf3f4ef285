"""The YAML entry of a host tier. The thread that opens a stack reads it."""

from __future__ import annotations

from pydantic import Field

from tiered_kv.config.settings import TierSettings


class HostTierSettings(TierSettings):
    """Settings of the tier that keeps blocks in the cache of a host's server."""

    type: str = "host"
    socket: str = Field(
        pattern="^unix:.+",
        examples=["unix:/run/tiered-kv/cache.sock"],
        description='"unix:" and the path of the socket of `tiered-kv serve`.',
    )
