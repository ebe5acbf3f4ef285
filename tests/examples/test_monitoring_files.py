"""The alert rules over series like those of stacks, and the dashboard beside Grafana's own model of dashboards.

Each alert fires with its fault, alone, and not before its time. No Grafana and no containers run here.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

from tests.support.pages import tier_metrics
from tests.support.prometheus import MONITORING, missing_prometheus
from tiered_kv.metrics.vocabulary import MANAGER, PREFIX, TIER_PREFIX

RULES = [rule for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
RUNBOOK = MONITORING.parents[1] / "docs" / "how-to" / "runbook.md"
COUNTERS = RUNBOOK.parents[1] / "reference" / "counters.md"
PROVISIONING = MONITORING / "grafana" / "provisioning"
EVER = 240
"""Minutes that the sound stack's series last."""

SOUND = {
    "up{}": f"1x29 0x1 1x{EVER}",
    'tiered_kv_breaker_state{tier="redis"}': f"0x{EVER}",
    'tiered_kv_quarantined_bytes{tier="redis"}': f"0x{EVER}",
    'tiered_kv_exceptions_total{tier="redis"}': f"0x{EVER}",
    'tiered_kv_stored_blocks_total{tier="redis"}': f"0+600x{EVER}",
    'tiered_kv_loaded_blocks_total{tier="redis"}': f"0+600x{EVER}",
    'tiered_kv_skipped_blocks_total{tier="redis",reason="budget"}': f"0+60x{EVER}",
    'tiered_kv_skipped_blocks_total{tier="redis",reason="breaker"}': f"_x30 5+0x{EVER}",
    'tiered_kv_failed_blocks_total{tier="redis",direction="load",reason="absent"}': f"0+6x{EVER}",
    'tiered_kv_audited_blocks_total{tier="redis",result="identical"}': f"0+6x{EVER}",
    'tiered_kv_stored_bytes_total{tier="redis"}': f"0+6000x{EVER}",
    'tiered_kv_tier_wasted_bytes_total{tier="redis"}': f"0+3000x{EVER}",
    'tiered_kv_blocks_total{tier="cpu",result="miss"}': f"0+600x{EVER}",
    'tiered_kv_blocks_total{tier="redis",result="hit"}': f"0+60x{EVER}",
    'tiered_kv_job_seconds_bucket{tier="redis",direction="load",le="0.05"}': f"0+100x{EVER}",
    'tiered_kv_job_seconds_bucket{tier="redis",direction="load",le="+Inf"}': f"0+100x{EVER}",
    'tiered_kv_step_seconds_bucket{tier="cpu",le="0.0005"}': f"0+100x{EVER}",
    'tiered_kv_step_seconds_bucket{tier="cpu",le="+Inf"}': f"0+100x{EVER}",
}
"""A stack that has nothing wrong: it was busy, its process was away for a minute, and its breaker open for a moment."""

FAULTS: dict[str, tuple[dict[str, str], int, int]] = {
    "TieredKVDown": ({"up{}": "1x10 0x20"}, 13, 15),
    "TieredKVBreakerOpen": ({'tiered_kv_breaker_state{tier="redis"}': "0x10 2 1 2 1 2 1 2"}, 11, 13),
    "TieredKVTierStopped": ({'tiered_kv_skipped_blocks_total{tier="fs",reason="disabled"}': "_x10 7x60"}, 9, 13),
    "TieredKVDamagedBlocks": ({'tiered_kv_tier_corrupt_blocks_total{tier="fs",reason="crc"}': "_x10 1x60"}, 9, 13),
    "TieredKVAuditDifference": ({'tiered_kv_audited_blocks_total{tier="fs",result="different"}': "_x10 1x60"}, 9, 13),
    "TieredKVNoSpace": (
        {'tiered_kv_failed_blocks_total{tier="fs",direction="store",reason="no_space"}': "1x30 2x60"},
        30,
        33,
    ),
    "TieredKVStoresSkipped": (
        {
            'tiered_kv_stored_blocks_total{tier="fs"}': "0+100x60",
            'tiered_kv_skipped_blocks_total{tier="fs",reason="budget"}': "0x10 0+50x50",
        },
        18,
        30,
    ),
    "TieredKVBlocksFail": (
        {
            'tiered_kv_stored_blocks_total{tier="fs"}': "0+100x60",
            'tiered_kv_loaded_blocks_total{tier="fs"}': "0+100x60",
            'tiered_kv_failed_blocks_total{tier="fs",direction="load",reason="io_error"}': "_x10 0+50x50",
        },
        14,
        30,
    ),
    "TieredKVQuarantine": ({'tiered_kv_quarantined_bytes{tier="fs"}': "0x10 65536x20"}, 15, 17),
    "TieredKVExceptions": ({'tiered_kv_exceptions_total{tier="fs"}': "0x10 1x30"}, 10, 13),
    "TieredKVSlowLoads": (
        {
            'tiered_kv_job_seconds_bucket{tier="fs",direction="load",le="1.0"}': "0+95x60",
            'tiered_kv_job_seconds_bucket{tier="fs",direction="load",le="2.5"}': "0+100x60",
            'tiered_kv_job_seconds_bucket{tier="fs",direction="load",le="+Inf"}': "0+100x60",
        },
        9,
        15,
    ),
    "TieredKVSlowSteps": (
        {
            'tiered_kv_step_seconds_bucket{tier="cpu",le="0.005"}': "0+95x60",
            'tiered_kv_step_seconds_bucket{tier="cpu",le="0.01"}': "0+100x60",
            'tiered_kv_step_seconds_bucket{tier="cpu",le="+Inf"}': "0+100x60",
        },
        9,
        15,
    ),
    "TieredKVWrittenInVain": (
        {
            'tiered_kv_stored_bytes_total{tier="fs"}': f"0+1000x{EVER}",
            'tiered_kv_tier_wasted_bytes_total{tier="fs"}': f"0+900x{EVER}",
        },
        55,
        65,
    ),
    "TieredKVNoHits": ({'tiered_kv_blocks_total{tier="cpu",result="miss"}': f"0+100x{EVER}"}, 29, 40),
}
"""By alert: the series of another stack with its fault, a minute before it fires, and one at which it does."""


def test_every_alert_says_what_is_wrong_and_what_to_do_about_metrics_that_there_are() -> None:
    known = {f"{PREFIX}{name}" for name in MANAGER} | {f"{TIER_PREFIX}{name}" for name in tier_metrics()}
    for rule in RULES:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"].keys() == {"summary", "action", "runbook_url"}
        assert rule["annotations"]["runbook_url"].endswith(f"/how-to/runbook.html#{rule['alert'].lower()}")
        assert "$labels.instance" in rule["annotations"]["summary"]
        named = set(re.findall(r"tiered_kv_\w+", rule["expr"]))
        assert {name.removesuffix("_bucket") for name in named} <= known
        chosen = set(re.findall(r'\w+!?="(\w+)"', rule["expr"])) - {"cpu"}
        assert {value for value in chosen if f"`{value}`" not in COUNTERS.read_text()} == set()
    alerts = {rule["alert"]: rule["labels"]["severity"] for rule in RULES}
    assert alerts.keys() == FAULTS.keys()
    page = RUNBOOK.read_text()
    sections = re.findall(r"^## (TieredKV\w+)\n\n\*\*(\w+)\*\*: ", page, re.MULTILINE)
    assert sorted(alerts.items()) == sorted((alert, severity.lower()) for alert, severity in sections)


@pytest.mark.skipif(bool(missing_prometheus()), reason=missing_prometheus() or "it is")
def test_prometheus_accepts_the_rules_and_the_configuration() -> None:
    for what, file in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        done = subprocess.run(["promtool", "check", what, MONITORING / file], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_prometheus()), reason=missing_prometheus() or "it is")
def test_each_alert_fires_with_its_fault_alone_and_not_before_its_time(tmp_path: Path) -> None:
    cases = [_case("sound", {}, [(minute, "") for minute in sorted({*range(0, EVER, 20), 31, 32})])]
    for alert, (series, before, at) in FAULTS.items():
        cases.append(_case(alert, series, [(before, ""), (at, alert)]))
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(MONITORING / "alerts.yml")], "tests": cases}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def _case(name: str, series: dict[str, str], expected: list[tuple[int, str]]) -> dict[str, object]:
    def given(stack: str, entries: dict[str, str]) -> list[dict[str, str]]:
        labels = f'job="tiered-kv",instance="{stack}",'
        return [{"series": key.replace("{", "{" + labels, 1), "values": values} for key, values in entries.items()]

    return {
        "name": name,
        "interval": "1m",
        "input_series": given("sound", SOUND) + given("faulty", series),
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert else [],
            }
            for minute, alert in expected
        ],
    }


def test_the_containers_find_the_files_where_they_are_mounted() -> None:
    services = yaml.safe_load((MONITORING / "compose.yaml").read_text())["services"]
    for service in services.values():
        assert ".:/etc/tiered-kv:ro" in service["volumes"]
        named = re.findall(
            r"/etc/tiered-kv(/[\w./]+)?", json.dumps([service.get("command"), service.get("environment")])
        )
        assert named
        assert [path for path in named if not (MONITORING / path.lstrip("/")).exists()] == []
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "tiered-kv.yml").read_text())["providers"]
    asked = {source["url"], provider["options"]["path"]}
    assert asked == {"${TIERED_KV_PROMETHEUS}", "${TIERED_KV_MONITORING}"}
    assert {name.strip("${}") for name in asked} <= services["grafana"]["environment"].keys()
    assert [path.name for path in MONITORING.rglob("*.json")] == ["dashboard.json"], "Grafana reads each as a dashboard"


# The dashboard.


TEXT = (MONITORING / "dashboard.json").read_text()
BOARD = json.loads(TEXT)
OPTIONS = {"stat": stat.Options, "timeseries": timeseries.Options, "state-timeline": statetimeline.Options}
COLUMNS = 24


def read(board: Any) -> Dashboard:  # Any: JSON
    register_default_plugins()
    return Dashboard.from_json(board)


def test_grafana_s_model_has_every_field_of_the_dashboard() -> None:
    assert list(lost(BOARD, written(read(BOARD)))) == []


def test_a_field_that_grafana_does_not_know_is_found() -> None:
    board = json.loads(TEXT)
    board["panels"][1]["targets"][0]["expression"] = "up"
    assert list(lost(board, written(read(board)))) == [".panels[1].targets[0].expression"]


def test_every_panel_is_of_a_kind_that_the_model_knows_and_asks_prometheus() -> None:
    shown = [panel for panel in read(BOARD).panels or () if isinstance(panel, Panel)]
    assert len(shown) == sum(panel["type"] != "row" for panel in BOARD["panels"])
    for panel in shown:
        assert isinstance(panel.options, OPTIONS[panel.type_val]), panel.title
        letters = {target.ref_id for target in panel.targets or () if isinstance(target, prometheus.Dataquery)}
        assert len(letters) == len(panel.targets or ()) > 0, panel.title


def test_panels_lie_beside_each_other_and_variables_are_defined() -> None:
    places: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= COLUMNS, panel["title"]
        covered = set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
        assert not places & covered, panel["title"]
        places |= covered
    defined = {variable["name"] for variable in BOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", TEXT)) - {"__all", "__rate_interval", "__range"} == defined


def written(board: Dashboard) -> Any:  # Any: JSON
    return json.loads(JSONEncoder().encode(board))


def lost(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:  # Any: JSON
    """Yield the paths of what a model that has read `ours` does not write again."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name, value in ours.items():
            yield from lost(value, theirs.get(name), f"{path}.{name}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from lost(*pair, f"{path}[{index}]")
    elif ours != theirs:
        yield path
