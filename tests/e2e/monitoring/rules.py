"""The rules and the dashboard of `manifests/monitoring`, as programs and tests take them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[3]
MONITORING: Final = ROOT / "manifests" / "monitoring"
RUNBOOK: Final = ROOT / "docs" / "runbook.md"
UNIT_TESTS: Final = Path(__file__).parent / "alerts.yaml"

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def groups() -> list[dict[str, Any]]:
    """The groups of rules, as a rule file of Prometheus has them."""
    found: list[dict[str, Any]] = yaml.safe_load((MONITORING / "prometheusrule.yaml").read_text())["spec"]["groups"]
    return found


def alerts() -> list[dict[str, Any]]:
    """Every alert; one name may have two severities."""
    return [rule for group in groups() for rule in group["rules"] if "alert" in rule]


def rules() -> list[dict[str, Any]]:
    """Every rule."""
    return [rule for group in groups() for rule in group["rules"]]


def write(path: Path, found: list[dict[str, Any]]) -> Path:
    """Write groups as a rule file."""
    path.write_text(yaml.safe_dump({"groups": found}, sort_keys=False))
    return path


def with_summaries_only() -> list[dict[str, Any]]:
    """The groups without the other annotations: promtool compares all that there are."""
    found = groups()
    for rule in (rule for group in found for rule in group["rules"] if "alert" in rule):
        rule["annotations"] = {"summary": rule["annotations"]["summary"]}
    return found


def hurried() -> list[dict[str, Any]]:
    """The groups with short durations, for a test that waits for alerts: windows of 4 to 15 s, waits of 1 to 5 s."""
    found = groups()
    for rule in (rule for group in found for rule in group["rules"]):
        rule["expr"] = re.sub(r"\[(\d+[smhd])\]", lambda match: f"[{_scaled(match[1], 100, 4, 15)}]", rule["expr"])
        if "for" in rule:
            rule["for"] = _scaled(rule["for"], 200, 1, 5)
    return found


def _scaled(duration: str, divisor: int, least: int, most: int) -> str:
    seconds = int(duration[:-1]) * _SECONDS[duration[-1]]
    return f"{min(max(seconds // divisor, least), most)}s"


def runbook(alert: str) -> str:
    """The entry of an alert, or an empty text."""
    found = re.search(rf"(?ms)^## {alert}\n(.*?)(?=^## |\Z)", RUNBOOK.read_text())
    return found[1] if found else ""


def commands(alert: str) -> list[str]:
    """The commands of an alert's entry."""
    blocks = re.findall(r"(?ms)^```\n(.*?)^```", runbook(alert))
    return [line for block in blocks for line in block.splitlines()]


def dashboard() -> dict[str, Any]:
    """The dashboard."""
    found: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text())
    return found


def panels() -> list[dict[str, Any]]:
    """The panels that show something."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def query(expression: str, *, interval: str = "5s") -> str:
    """A query of the dashboard as Grafana sends it, for all nodes."""
    return expression.replace("$node", ".*").replace("$__rate_interval", interval)
