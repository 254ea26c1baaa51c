"""`docs/metrics.md` is what the declarations say, and each metric is used by somebody."""

from __future__ import annotations

import re

from multus_daemon.metrics.declared import GROUPS, OUTCOMES
from tests.repo import metrics_page

DECLARED = [item for group in GROUPS.values() for item in group]


def test_the_page_is_what_the_metrics_are() -> None:
    assert metrics_page.PAGE.read_text() == metrics_page.page(), "make metrics"


def test_every_metric_is_used() -> None:
    """By an alert, a dashboard, or a page that says what to do; another one has no reason to be."""
    assert [item.name for item in DECLARED if not metrics_page.users(item)] == [], f"by none of {metrics_page.USERS}"


def test_the_page_names_every_metric() -> None:
    assert {item.name for item in DECLARED} <= metrics_page._named(metrics_page.ROOT / "docs" / "metrics.md")


def test_names_and_outcomes_keep_to_the_rules() -> None:
    for item in DECLARED:
        assert re.fullmatch(r"(multus|process)_[a-z_]+[a-z]", item.name), item.name
        if item.name != "multus_server_request_total":
            assert item.name.endswith("_total") == (item.kind == "counter"), item.name
        assert bool(item.buckets) == (item.kind == "histogram"), item.name
        assert list(item.buckets) == sorted(set(item.buckets)), item.name
        assert item.question.endswith("?"), item.name
        for label in item.labels:
            assert "container" not in label.name, item.name
            if label.name == "outcome":
                assert label.values <= OUTCOMES, item.name
    assert len({item.name for item in DECLARED}) == len(DECLARED)
