"""nginx as an S3 server that moves bytes as fast as a server can: PUT, GET, HEAD and DELETE, unsigned."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path

from tiered_kv.testing.s3_servers import S3Server

_CONFIGURATION = """
daemon off;
{user}
worker_processes 1;
pid nginx.pid;
error_log error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  sendfile on;
  tcp_nodelay on;
  keepalive_requests 10000000;
  client_max_body_size 0;
  client_body_buffer_size 8m;
  client_body_temp_path temp_body;
  proxy_temp_path temp_proxy;
  fastcgi_temp_path temp_fastcgi;
  uwsgi_temp_path temp_uwsgi;
  scgi_temp_path temp_scgi;
  server {{
    listen 127.0.0.1:{port};
    root data;
    location / {{
      dav_methods PUT DELETE;
      create_full_put_path on;
    }}
  }}
}}
"""


def start_nginx(folder: Path) -> S3Server:
    """Start nginx on a free port, with its files in `folder`, and return once it listens.

    A bucket is a folder that the first PUT makes. It knows neither listings nor signatures.

    Raises:
        RuntimeError: It did not start.
    """
    (folder / "data").mkdir(parents=True, exist_ok=True)
    server = S3Server(functools.partial(_command, folder))
    server.start()
    return server


def _command(folder: Path, port: int) -> list[str]:
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    assert program is not None, "nginx is not installed"
    configuration = folder / "nginx.conf"
    configuration.write_text(_CONFIGURATION.format(port=port, user="user root;" if os.geteuid() == 0 else ""))
    return [program, "-p", str(folder), "-c", str(configuration), "-e", str(folder / "error.log")]
