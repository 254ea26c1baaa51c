"""Every query of the dashboard and of the rules returns data of real daemons under load."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.metrics import declared
from tests.e2e.monitoring import load, rules
from tests.e2e.monitoring.prometheus import Prometheus
from tests.e2e.node import Node

QUERIES = [(panel, target) for panel in rules.panels() for target in panel["targets"]]
OF_CERTIFICATES = "multus_client_certificate"
"""Only with perNodeCertificate; test_alerts.py has such a node."""
OF_RUNTIME = 'condition="runtime"'
"""Only of a daemon that writes the CNI configuration; test_alerts.py has such a node."""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    directory = tmp_path_factory.mktemp("prometheus")
    rule_file = rules.write(directory / "rules.yaml", rules.hurried())
    with Prometheus(directory, rule_file, list(load.NODES)) as running:
        yield running


def test_every_query_returns_data(make_node: Callable[..., Node], prometheus: Prometheus, tmp_path: Path) -> None:
    with load.running(make_node, tmp_path, prometheus):
        wanted = {rules.query(target["expr"]) for _, target in QUERIES if OF_CERTIFICATES not in target["expr"]} | {
            selector for rule in rules.rules() for selector in selectors(rule["expr"])
        }
        wanted |= {rule["record"] for rule in rules.rules() if "record" in rule and "certificate" not in rule["record"]}
        missing = set(wanted)

        def all_return_data() -> bool:
            missing.difference_update([expression for expression in missing if has_data(prometheus.query(expression))])
            return not missing

        try:
            prometheus.until(all_return_data, "every query returns data")
        except AssertionError:
            assert sorted(missing) == []
            raise


def selectors(expression: str) -> Iterator[str]:
    """The series that an alert or a recording rule reads, without those of a certificate."""
    for found in re.findall(r"(?<![\w:])(?:multus_\w+|up)(?:\{[^}]*\})?", expression):
        if OF_CERTIFICATES not in found and OF_RUNTIME not in found:
            yield found


def has_data(samples: list[dict[str, Any]]) -> bool:
    return any(not math.isnan(float(sample["value"][1])) for sample in samples)


def test_every_metric_of_the_rules_and_the_dashboard_is_declared() -> None:
    names = {item.name for group in declared.GROUPS.values() for item in group}
    recorded = {rule["record"] for rule in rules.rules() if "record" in rule}
    read = [rule["expr"] for rule in rules.rules()] + [target["expr"] for _, target in QUERIES]
    for expression in read:
        for found in re.findall(r"(?<![\w:])multus_\w+", expression.replace('"multus-daemon"', "")):
            assert {found, re.sub(r"_(bucket|sum|count)$", "", found)} & names, found
        for found in re.findall(r"\w+:\w+:\w+", expression):
            assert found in recorded


# --- the dashboard by itself -----------------------------------------------------------------------------------------


def test_the_first_row_names_every_runbook_entry_of_the_service() -> None:
    first = [panel for panel in rules.panels() if panel["gridPos"]["y"] == 1]
    assert [panel["title"].split(".")[0] for panel in first] == [str(number + 1) for number in range(len(first))]
    assert all("Runbook: Multus" in panel["description"] for panel in first)
