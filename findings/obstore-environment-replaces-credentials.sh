#!/usr/bin/env bash
# obstore: a variable of the environment takes the place of the credential that the program gives to AzureStore.
#
# What happens: AzureStore(..., account_key=KEY) signs its requests with the key ("SharedKey"). If AZURE_STORAGE_TOKEN is
# set, it sends that token instead ("Bearer"), and if only AZURE_STORAGE_ACCOUNT_KEY is set, that key replaces a sas_token
# of the call. One expects that what a call names goes before the environment. So a program with its own key acts with a
# token that was meant for another, and a refusal blames a credential that nobody gave.
# Seen: obstore 0.12.1, Python 3.11, Linux. Who meets it: hosts and images that export Azure's variables.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check obstore==0.12.1
AZURE_STORAGE_TOKEN="" "$work/venv/bin/python" - <<'PYTHON'
import base64, http.server, os, sys, threading
from importlib.metadata import version

from obstore.store import AzureStore

seen = []


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        given = self.headers["Authorization"] or ("SAS" if "sig=" in self.path else "none")
        seen.append(given.split()[0])
        self.send_response(201)
        for name, value in (("ETag", '"1"'), ("Content-Length", "0")):
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *arguments):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
key = base64.b64encode(bytes(32)).decode()
sas = "sv=2024-11-04&ss=b&srt=co&sp=rwl&se=2099-01-01T00:00:00Z&sig=AAAA"


def sent(variables, **credential):
    for name in ("AZURE_STORAGE_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    store = AzureStore("blocks", account_name="account", endpoint=f"http://127.0.0.1:{server.server_port}",
                       client_options={"allow_http": True}, **credential)
    store.put("name", b"data", use_multipart=False)
    return seen[-1]


found = {
    "account_key": sent({}, account_key=key),
    "account_key, AZURE_STORAGE_TOKEN is set": sent({"AZURE_STORAGE_TOKEN": "token"}, account_key=key),
    "sas_token": sent({}, sas_token=sas),
    "sas_token, AZURE_STORAGE_ACCOUNT_KEY is set": sent({"AZURE_STORAGE_ACCOUNT_KEY": key}, sas_token=sas),
}
print("obstore", version("obstore"))
for case, scheme in found.items():
    print(f"{case}: sent {scheme}")
sys.exit(list(found.values()) != ["SharedKey", "Bearer", "SAS", "SharedKey"])
PYTHON
