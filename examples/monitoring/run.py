"""Starts Prometheus and Grafana, as installed on this machine, with the files of this folder; Ctrl-C ends both.

    python examples/monitoring/run.py

Then open http://127.0.0.1:3000. prometheus.yml has the stacks' addresses. compose.yaml does the same with containers.
Both servers listen on loopback only. Without Grafana, Prometheus is started alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
POLL_S = 0.2
END_S = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Start Prometheus and Grafana on loopback.")
    cache = Path.home() / ".cache" / "tiered-kv-monitoring"
    parser.add_argument("--data", type=Path, default=cache, help="directory for their data (default: %(default)s)")
    parser.add_argument("--prometheus-port", type=int, default=9090)
    parser.add_argument("--grafana-port", type=int, default=3000)
    options = parser.parse_args()
    data = options.data.resolve()
    data.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    prometheus = prometheus_command(data, options.prometheus_port)
    if prometheus is None:
        print("prometheus is not on the path: install it (Debian: apt-get install prometheus), or use compose.yaml.")
        return 1
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.append(subprocess.Popen(prometheus))
        url = f"http://127.0.0.1:{options.prometheus_port}"
        print(f"Prometheus: {url}", flush=True)
        grafana = grafana_command(data, options.grafana_port)
        if grafana is None:
            print("Grafana is not on the path: install it, or use compose.yaml.", flush=True)
        else:
            processes.append(subprocess.Popen(grafana, env=grafana_environment(url)))
            print(f"Grafana: http://127.0.0.1:{options.grafana_port}", flush=True)
        while all(process.poll() is None for process in processes):
            time.sleep(POLL_S)
        return 1  # one of them ended, and has said why
    except (KeyboardInterrupt, SystemExit):
        return 0
    finally:
        end(processes)


def prometheus_command(data: Path, port: int) -> list[str] | None:
    program = shutil.which("prometheus")
    return program and [
        program,
        f"--config.file={HERE / 'prometheus.yml'}",
        f"--storage.tsdb.path={data / 'prometheus'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]


def grafana_command(data: Path, port: int) -> list[str] | None:
    """Return the command; Grafana's own files are beside its program, or where a package puts them."""
    program = shutil.which("grafana")
    if program is None:
        return None
    homes = [Path(program).resolve().parents[1], Path("/usr/share/grafana")]
    home = next((home for home in homes if (home / "conf" / "defaults.ini").exists()), homes[0])
    settings = {
        "server.http_port": port,
        "paths.data": data / "grafana",
        "paths.logs": data / "grafana" / "log",
        "paths.provisioning": HERE / "grafana" / "provisioning",
        "log.level": "warn",
    }
    config = HERE / "grafana" / "grafana.ini"
    overrides = [f"cfg:default.{name}={value}" for name, value in settings.items()]
    return [program, "server", f"--homepath={home}", f"--config={config}", *overrides]


def grafana_environment(prometheus_url: str) -> dict[str, str]:
    return {**os.environ, "TIERED_KV_MONITORING": str(HERE), "TIERED_KV_PROMETHEUS": prometheus_url}


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
