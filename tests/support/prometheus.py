"""A Prometheus on loopback that reads stacks every second, with this repository's configuration and alerts."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode
from urllib.request import urlopen

from tests.support.server_process import ServerProcess

MONITORING = Path(__file__).parents[2] / "examples" / "monitoring"
LISTEN = "127.0.0.1:9464"
OF_THE_MACHINE = {"TieredKVSlowLoads", "TieredKVSlowSteps"}
"""Alerts that a busy machine may cause."""
WAIT_S = 30.0
_POLL_S = 0.2

Seen = TypeVar("Seen")
Labels = frozenset[tuple[str, str]]


def missing_prometheus() -> str:
    return "" if shutil.which("prometheus") and shutil.which("promtool") else "prometheus is not installed"


class Prometheus(ServerProcess):
    """Reads the stacks that listen on `target_ports`; every `for` of an alert is a second. `directory` is empty."""

    def __init__(self, directory: Path, *target_ports: int) -> None:
        super().__init__()
        self._directory = directory
        config = (MONITORING / "prometheus.yml").read_text()
        assert LISTEN in config
        targets = '", "'.join(f"127.0.0.1:{port}" for port in target_ports)
        config = config.replace(LISTEN, targets).replace("15s", "1s")
        (directory / "prometheus.yml").write_text(config)
        alerts = (MONITORING / "alerts.yml").read_text()
        (directory / "alerts.yml").write_text(re.sub(r"for: \d+[mh]", "for: 1s", alerts))

    def command(self) -> list[str]:
        config, data = self._directory / "prometheus.yml", self._directory / "data"
        listen = f"--web.listen-address=127.0.0.1:{self.port}"
        return ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={data}", listen, "--log.level=warn"]

    def answers(self) -> bool:
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=WAIT_S) as answer:
                return bool(answer.status == 200)
        except (OSError, HTTPException):
            return False

    def query(self, expression: str) -> dict[Labels, float]:
        """Return the value of each series now, by its labels."""
        query = urlencode({"query": expression})
        with urlopen(f"http://127.0.0.1:{self.port}/api/v1/query?{query}", timeout=WAIT_S) as answer:
            result: list[Mapping[str, Any]] = json.load(answer)["data"]["result"]  # Any: JSON
        return {frozenset(each["metric"].items()): float(each["value"][1]) for each in result}

    def firing(self) -> set[str]:
        """Return the names of firing alerts."""
        return {dict(labels)["alertname"] for labels in self.query('ALERTS{alertstate="firing"}')}


def wait_for(look: Callable[[], Seen], wanted: Seen) -> None:
    """Return once `look` returns `wanted`; fail after `WAIT_S`."""
    end_s = time.monotonic() + WAIT_S
    while (seen := look()) != wanted and time.monotonic() < end_s:
        time.sleep(_POLL_S)
    assert seen == wanted, f"seen {seen}, wanted {wanted}"


def panels() -> dict[str, list[str]]:
    """Return the queries of each panel of the dashboard by its title, for one instance and a short time."""
    board = json.loads((MONITORING / "dashboard.json").read_text())
    return {
        panel["title"]: [
            target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m").replace("$__range", "1m")
            for target in panel["targets"]
        ]
        for panel in board["panels"]
        if panel["type"] != "row"
    }
