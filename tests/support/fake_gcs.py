"""A small Google Cloud Storage on loopback: the XML requests that obstore sends, over the objects of a `FakeS3`.

It also takes the uploads and downloads of Google's own client, which are of the JSON API. It takes the faults of
`FakeS3` too. Objects have an ETag, a PUT may ask that there is no object, and a DELETE of a missing object is an error,
as in the cloud.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import unquote

from tests.support.fake_s3 import FakeS3, Reply, Request, answer, error

TOKEN = "a-token-for-tests"
_UPLOADS = "/upload/storage/v1/b/bucket/o"
_DOWNLOADS = "/download/storage/v1/b/bucket/o/"


class FakeGCS(FakeS3):
    """Serves stored objects, unless `reply` or a fault replaces the answer."""

    def __init__(self) -> None:
        self.token = TOKEN
        """The token that is accepted."""
        super().__init__()

    @property
    def entry(self) -> dict[str, object]:
        return {
            "type": "gcs",
            "bucket": "bucket",
            "endpoint": self.url,
            "access_token": TOKEN,
            "connections": 4,
        }

    def _reply(self, request: Request) -> Reply:
        target, mark, query = request.target.partition("?")
        return super()._reply(replace(request, target=f"{unquote(target)}{mark}{query}"))

    def served(self, request: Request) -> bytes:
        target, headers = request.target.partition("?")[0], request.headers
        if headers.get("authorization", "") != f"bearer {self.token}":
            return error(401, "AuthenticationRequired")
        if target.startswith(_UPLOADS):
            return self._uploaded(request)
        if target.startswith(_DOWNLOADS):
            data = self.objects.get(f"/bucket/{target.removeprefix(_DOWNLOADS)}")
            return (
                error(404, "notFound") if data is None else answer(200, data, content_type="application/octet-stream")
            )
        if not target.startswith("/bucket"):
            return error(404, "NoSuchBucket")
        copied = headers.get("x-goog-copy-source")
        if copied is not None and f"/{unquote(copied)}" not in self.objects:
            return error(404, "NoSuchKey")
        if request.method == "DELETE" and target not in self.objects:
            return error(404, "NoSuchKey")
        if request.method == "PUT" and headers.get("x-goog-if-generation-match") == "0" and target in self.objects:
            return error(412, "PreconditionFailed")
        if copied is not None:
            request = replace(request, headers={**headers, "x-amz-copy-source": copied})
        served = super().served(request)
        return served.replace(b"\r\n", b'\r\netag: "e"\r\n', 1)

    def _uploaded(self, request: Request) -> bytes:
        """Store the second part of a body, under the name in the first."""
        end = (
            len(request.body)
            - len("\r\n----")
            - len(request.headers["content-type"].partition("boundary=")[2].strip('"'))
        )
        fields = request.body.index(b"\r\n\r\n") + 4
        head = request.body.index(b"\r\n--", fields)
        name = json.loads(request.body[fields:head])["name"]
        self.objects[f"/bucket/{name}"] = request.body[request.body.index(b"\r\n\r\n", head) + 4 : end]
        return answer(200, json.dumps({"name": name, "bucket": "bucket"}).encode(), content_type="application/json")

    def _listed(self, query: Mapping[str, str], body: bytes) -> bytes:
        prefix = f"/bucket/{query.get('prefix', '')}"
        if "delimiter" not in query:
            return super()._listed(query, body)
        names = [target.removeprefix(prefix) for target in self.objects if target.startswith(prefix)]
        folders = sorted({name.partition("/")[0] for name in names if "/" in name})
        texts = [f"<CommonPrefixes><Prefix>{query['prefix']}{each}/</Prefix></CommonPrefixes>" for each in folders]
        return answer(200, f"<ListBucketResult>{''.join(texts)}</ListBucketResult>".encode())
