#!/usr/bin/env bash
# moto's server lists the directory of its own package at every request, to find the service that the request is for.
#
# What happens: the application that dispatches to the services asks whether the host is the name of one of them, and
# learns these names from the file system: one os.listdir and some 180 stats a request, under a lock that all requests
# take (moto/moto_server/werkzeug_app.py, get_backend_for_host; moto/backends.py, list_of_moto_modules).
# Seen: moto 5.2.5 (server), werkzeug 3.1.4, Python 3.11.7: 300 listings in 300 requests. A request for an object's
# metadata takes 2.2 to 2.4 times the processor time of the same with the application of S3 alone; over HTTP 1.7 times.
# What a test suite can do: serve create_backend_app("s3") where it needs one service.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check 'moto[server]==5.2.5' 'werkzeug==3.1.4' 2>/dev/null
cat >"$work/look.py" <<'PYTHON'
import os
import sys
import time

import moto
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.test import Client

PACKAGE = os.path.dirname(moto.__file__)
SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, Signature=b"}
listings = []
sys.addaudithook(lambda event, args: event == "os.listdir" and str(args[0]) == PACKAGE and listings.append(args))


def heads(application, count):
    client = Client(application)
    assert client.put("/bucket", headers=SIGNED).status_code == 200
    assert client.put("/bucket/key", data=b"x", headers=SIGNED).status_code == 200
    del listings[:]
    begin_s = time.process_time()
    for _ in range(count):
        assert client.head("/bucket/key", headers=SIGNED).status_code == 200
    return len(listings), time.process_time() - begin_s


every, every_s = heads(DomainDispatcherApplication(create_backend_app), 300)
one, one_s = heads(create_backend_app("s3"), 300)
print(f"listings of the package in 300 requests: {every}, with the application of S3 alone {one}")
print(f"processor time: {every_s / one_s:.1f} times")
sys.exit(not (every >= 300 and one == 0))
PYTHON
"$work/venv/bin/python" "$work/look.py"
