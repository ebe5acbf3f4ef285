"""The YAML entry of an s3 tier on a test's server, and damage to its objects."""

from __future__ import annotations

from contextlib import closing

from tiered_kv.testing.s3_servers import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server


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
