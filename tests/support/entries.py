"""Tiers on a rig, made from their entry in a stack's YAML; and the entry of an s3 tier on a test's server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing

from tests.support.s3_servers import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server
from tiered_kv.testing.rig import Content, TierRig, block_content
from tiered_kv.tiering.base import TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory

EntryOf = Callable[[str], dict[str, object]]
"""Returns the entry of a tier over new storage, by the tier's type."""
OpenRig = Callable[..., TierRig]
"""Opens a tier on a rig, which is closed at the end of the test."""

NAMESPACE = bytes(range(16))
"""The namespace unless a test names another."""


def rig_of(
    entry: Mapping[str, object],
    *,
    block_bytes: int,
    num_blocks: int = 256,
    wait_s: float = 60.0,
    namespace: bytes = NAMESPACE,
    spec: TierSpec | None = None,
    content: Content = block_content,
) -> TierRig:
    """Open the tier of an entry on a rig, which the caller closes.

    Unless the entry sets `lookup_timeout`, it is `wait_s`: a busy machine must not turn hits into misses. Rigs with
    different namespaces are different tenants; `spec` replaces the namespace.
    """
    return TierRig(
        lambda spec, view: SecondaryTierFactory.create(spec, view, {"lookup_timeout": wait_s, **entry}),
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        wait_s=wait_s,
        spec=spec or TierSpec(str(entry["type"]), block_bytes, namespace, {"model": "bench"}, wants_events=True),
        content=content,
    )


def s3_entry(server: S3Server, bucket: str, **changes: object) -> dict[str, object]:
    """Return the YAML entry of an s3 tier in one of the server's buckets."""
    return {
        "type": "s3",
        "bucket": bucket,
        "endpoint_url": server.url,
        "region": REGION,
        "addressing": "path",
        "access_key_id": ACCESS_KEY_ID,
        "secret_access_key": SECRET_ACCESS_KEY,
        **changes,
    }


def damage_objects(server: S3Server, bucket: str, part: str) -> None:
    """Flip a bit in the last byte of every object with `part` in its name."""
    with closing(server.client()) as client:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        for name in [entry["Key"] for page in pages for entry in page.get("Contents", ())]:
            if part in name:
                data = bytearray(client.get_object(Bucket=bucket, Key=name)["Body"].read())
                data[-1] ^= 0x01
                client.put_object(Bucket=bucket, Key=name, Body=bytes(data))
