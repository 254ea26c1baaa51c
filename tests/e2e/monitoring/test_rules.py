"""promtool takes the rules; each alert has a unit test, in which it fires and resolves, and an entry in the runbook."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.e2e.monitoring import rules
from tests.e2e.monitoring.prometheus import check
from tests.repo.manifests import runbook_page

KEYS = sorted({(rule["alert"], rule["labels"]["severity"]) for rule in rules.alerts()})
NAMES = sorted({name for name, _ in KEYS})


def test_promtool_takes_the_rules(tmp_path: Path) -> None:
    check(["check", "rules", "--lint-fatal", str(rules.write(tmp_path / "rules.yaml", rules.groups()))])


def test_every_alert_fires_and_resolves(tmp_path: Path) -> None:
    rules.write(tmp_path / "rules.yaml", rules.with_summaries_only())
    check(["test", "rules", str(shutil.copy(rules.UNIT_TESTS, tmp_path / "alerts.yaml"))])


@pytest.mark.parametrize(("name", "severity"), KEYS)
def test_an_alert_has_a_unit_test(name: str, severity: str) -> None:
    def fires(case: dict[str, list[dict[str, str]]]) -> bool:
        return any(
            expected["exp_labels"]["severity"] == severity  # type: ignore[index]
            for item in case.get("alert_rule_test", ())
            if item["alertname"] == name
            for expected in item.get("exp_alerts", ())
        )

    def resolves(case: dict[str, list[dict[str, str]]]) -> bool:
        of_it = [item for item in case.get("alert_rule_test", ()) if item["alertname"] == name]
        if of_it and not of_it[-1].get("exp_alerts"):
            return True
        gone = f'ALERTS{{alertname="{name}", severity="{severity}"}}'
        return any(item["expr"] == gone and not item["exp_samples"] for item in case.get("promql_expr_test", ()))

    cases = yaml.safe_load(rules.UNIT_TESTS.read_text())["tests"]
    assert any(fires(case) and resolves(case) for case in cases)


@pytest.mark.parametrize("rule", rules.alerts(), ids=lambda rule: f"{rule['alert']}-{rule['labels']['severity']}")
def test_an_alert_says_what_it_is_about_and_where_to_read_on(rule: dict[str, dict[str, str]]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"{runbook_page()}#{str(rule['alert']).lower()}"
    assert rules.commands(str(rule["alert"])), "an entry with commands in docs/runbook.md"


def test_the_runbook_has_no_other_entry() -> None:
    headings = re.findall(r"(?m)^## (Multus\w+)$", rules.RUNBOOK.read_text())
    assert sorted(headings) == NAMES
