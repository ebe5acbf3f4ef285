"""A small Azure Blob Storage on loopback: the requests that obstore sends, over the objects of a `FakeS3`.

It takes the faults of `FakeS3` too. It checks no signature; `tests.support.azurite` is a server that does.
"""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.support.fake_s3 import FakeS3, Reply, Request, answer, error

ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account of every Azurite, with its published key."""
_GONE = b"HTTP/1.1 202 Accepted"
_MISSING = b"HTTP/1.1 404 The specified blob does not exist.\r\nx-ms-error-code: BlobNotFound"
_DENIED = b"HTTP/1.1 403 Denied\r\nx-ms-error-code: AuthorizationPermissionMismatch"


class FakeAzure(FakeS3):
    """Serves stored objects, unless `reply` or a fault replaces the answer."""

    @property
    def entry(self) -> dict[str, object]:
        return {
            "type": "azure",
            "account": ACCOUNT,
            "container": "bucket",
            "endpoint": self.url,
            "account_key": ACCOUNT_KEY,
            "connections": 4,
        }

    def _reply(self, request: Request) -> Reply:
        target, mark, query = request.target.partition("?")
        return super()._reply(replace(request, target=f"{unquote(target)}{mark}{query}"))

    def served(self, request: Request) -> bytes:
        target, _, query = request.target.partition("?")
        if not f"{target}/".startswith("/bucket/"):
            return error(404, "ContainerNotFound")
        if "comp=batch" in query:
            return self._deleted(request)
        if "comp=list" in query:
            return self._blobs(dict(parse_qsl(query, keep_blank_values=True)))
        copied = unquote(urlsplit(request.headers.get("x-ms-copy-source", "")).path)
        if (copied or target) not in self.objects and (copied or request.method != "PUT"):
            return error(404, "BlobNotFound")
        if request.method == "DELETE":
            del self.objects[target]
            return answer(202)
        if request.method == "PUT":
            if request.headers.get("if-none-match") == "*" and target in self.objects:
                return error(409, "BlobAlreadyExists")
            self.objects[target] = self.objects[copied] if copied else request.body
            self.written_s[target] = time.time()
            return answer(202 if copied else 201, etag='"e"', last_modified=self._date(target))
        data, date = self.objects[target], self._date(target)
        if "x-ms-range" in request.headers:  # Azure's own client asks for the first 32 MiB
            sent = f"bytes 0-{len(data) - 1}/{len(data)}"
            return answer(206, data, etag='"e"', last_modified=date, content_range=sent)
        return answer(200, data, etag='"e"', last_modified=date)

    def _date(self, target: str) -> str:
        return email.utils.formatdate(self.written_s.get(target, time.time()), usegmt=True)

    def _deleted(self, request: Request) -> bytes:
        """Answer a request that deletes several blobs: the others, if some are missing."""
        parts = []
        for number, target in enumerate(re.findall(rb"DELETE (\S+) HTTP", request.body)):
            if self.always.get("DELETE"):
                status = _DENIED
            else:
                status = _MISSING if self.objects.pop(unquote(target.decode()), None) is None else _GONE
            head = f"--batchresponse\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n".encode()
            parts.append(head + status + b"\r\nContent-Length: 0\r\n\r\n")
        body = b"".join(parts) + b"--batchresponse--\r\n"
        return answer(202, body, content_type="multipart/mixed; boundary=batchresponse")

    def _blobs(self, query: Mapping[str, str]) -> bytes:
        prefix, texts = query.get("prefix", ""), list[str]()
        names = sorted(target.removeprefix("/bucket/") for target in self.objects)
        after = query.get("marker", "")
        names = [name for name in names if name.startswith(prefix) and name > after]
        if "delimiter" in query:
            inner = (name.removeprefix(prefix) for name in names)
            folders = sorted({name.partition("/")[0] for name in inner if "/" in name})
            texts += [f"<BlobPrefix><Name>{prefix}{each}/</Name></BlobPrefix>" for each in folders]
            names = []
        page, more = names[: self.page_objects], len(names) > self.page_objects
        for name in page:
            date, size = self._date(f"/bucket/{name}"), len(self.objects.get(f"/bucket/{name}", b""))
            texts.append(
                f"<Blob><Name>{name}</Name><Properties><Last-Modified>{date}</Last-Modified>"
                f"<Etag>e</Etag><Content-Length>{size}</Content-Length><Content-Type>a/b</Content-Type></Properties></Blob>"
            )
        marker = f"<NextMarker>{page[-1]}</NextMarker>" if more else "<NextMarker />"
        text = f"<EnumerationResults><Blobs>{''.join(texts)}</Blobs>{marker}</EnumerationResults>"
        return answer(200, text.encode())
