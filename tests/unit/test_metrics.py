"""What is recorded, and what a scrape shows, read by the parsers of prometheus_client."""

import asyncio
import math
import time

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from multus_daemon.metrics import Metrics
from multus_daemon.metrics.declared import GROUPS, NETWORKS_MAX, OUTCOMES, REVIEWED, STAGES, TRAFFIC, VERBS
from multus_daemon.plugins.child import DeadlineExceededError
from multus_daemon.plugins.plugin import outcome_of
from multus_daemon.runtime import deadline
from multus_daemon.runtime.deadline import Deadline, ExpiredError, Interrupted
from multus_daemon.spec.cni.errors import CniError, InvalidNetworkConfigError, TryAgainLaterError

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;"
    "q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
DECLARED = [item for group in GROUPS.values() for item in group]


@pytest.fixture
def metrics():
    return Metrics(version="1.2.3")


def exposition(metrics):
    return metrics.render()[0].decode()


def samples(metrics):
    """Return all samples of a scrape by name and sorted labels."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parse_text(exposition(metrics))
        for sample in family.samples
    }


def sample(metrics, name, **labels):
    return samples(metrics).get((name, *sorted(labels.items())))


def test_the_counter_of_upstream(metrics):
    metrics.request("/cni", 400, "POST")
    metrics.request("/cni", 400, "POST")
    text = exposition(metrics)
    assert "# HELP multus_server_request_total Counter of HTTP requests\n" in text
    assert "# TYPE multus_server_request_total counter\n" in text
    assert 'multus_server_request_total{code="400",handler="/cni",method="post"} 2.0\n' in text


@pytest.mark.parametrize(
    ("path", "handler"),
    [
        ("/cni", "/cni"),
        ("/delegate", "/delegate"),
        ("/healthz", "/healthz"),
        ("/readyz", "/readyz"),
        ("/metrics", "NotFound"),
        ("", "NotFound"),
    ],
)
def test_handlers(metrics, path, handler):
    metrics.request(path, 200, "GET")
    assert sample(metrics, "multus_server_request_total", handler=handler, code="200", method="get") == 1


def test_unknown_methods_share_a_series(metrics):
    metrics.request("/cni", 405, "BREW")
    metrics.request("/cni", 405, "brew2")
    assert sample(metrics, "multus_server_request_total", handler="/cni", code="405", method="other") == 2


def test_requests_are_measured_in_seconds_from_milliseconds_on(metrics):
    metrics.verb("ADD", "success", 0.005)
    metrics.verb("ADD", "success", 45)
    name, labels = "multus_cni_request_duration_seconds", {"verb": "ADD", "outcome": "success"}
    counts = {
        bound: sample(metrics, f"{name}_bucket", le=bound, **labels) for bound in ("0.005", "30.0", "120.0", "+Inf")
    }
    assert counts == {"0.005": 1, "30.0": 1, "120.0": 2, "+Inf": 2}
    assert sample(metrics, f"{name}_sum", **labels) == pytest.approx(45.005)
    assert sample(metrics, f"{name}_count", **labels) == 2


def test_stages_are_measured_with_their_request(metrics):
    metrics.verb("ADD", "success", 0.3, {"plan": 0.001, "plugin": 0.2})
    metrics.verb("GC", "success", 0.3, {"plugin": 0.9})
    assert sample(metrics, "multus_cni_stage_duration_seconds_sum", verb="ADD", stage="plugin") == 0.2
    assert sample(metrics, "multus_cni_stage_duration_seconds_count", verb="ADD", stage="plan") == 1
    # Its networks are collected side by side.
    assert sample(metrics, "multus_cni_stage_duration_seconds_count", verb="GC", stage="plugin") is None


def test_unknown_verbs_and_outcomes_share_a_series(metrics):
    for number in range(100):
        metrics.verb(f"V{number}", f"o{number}", 1)
    assert sample(metrics, "multus_cni_request_duration_seconds_count", verb="other", outcome="other") == 100


def test_plugin_types_are_bounded(metrics):
    for number in range(200):
        metrics.plugin(f"type{number}", "ADD", "success", 0.1)
    metrics.plugin("type0", "ADD", "success", 0.1)
    counts = {
        dict(labels)["plugin"]: value
        for (name, *labels), value in samples(metrics).items()
        if name == "multus_plugin_duration_seconds_count"
    }
    assert len(counts) == 65
    assert (counts["other"], counts["type0"]) == (200 - 64, 2)


def test_networks_are_the_first_hundred_in_all_families(metrics):
    for number in range(150):
        metrics.network(f"web/net-{number}", "success", 0.1)
    metrics.measure("multus_attachments", lambda: {f"web/net-{number}": 2 for number in range(150)})
    metrics.measure("multus_ipam_used_ratio", lambda: {f"web/net-{number}": number / 150 for number in range(150)})
    metrics.measure_traffic(lambda: {(f"web/net-{number}",): [1] * len(TRAFFIC) for number in range(150)})
    found = samples(metrics)
    for name, other in (
        ("multus_network_add_duration_seconds_count", 50),
        ("multus_attachments", 100),
        # The fullest of those that are shown as one.
        ("multus_ipam_used_ratio", 149 / 150),
        ("multus_network_receive_bytes_total", 50),
    ):
        of_name = {dict(labels)["network"]: value for (shown, *labels), value in found.items() if shown == name}
        assert len(of_name) == NETWORKS_MAX + 1, name
        assert of_name["other"] == other
        assert "web/net-99" in of_name


@pytest.mark.parametrize("name", ["x" * 10_000, 'a\n"b\\', "\ud800", ""])
def test_odd_names_do_no_harm(metrics, name):
    metrics.plugin(name, "ADD", "success", 0.1)
    metrics.network(name, "success", 0.1)
    for accept, parse in (("", parse_text), ("application/openmetrics-text", parse_openmetrics)):
        text = metrics.render(accept)[0].decode()
        shown = [
            sample.labels["plugin"]
            for family in parse(text)
            for sample in family.samples
            if sample.name == "multus_plugin_duration_seconds_count"
        ]
        assert [len(item) <= 128 for item in shown] == [True]
        if name.startswith("a"):
            assert shown == [name]


def test_the_process(metrics):
    found = samples(metrics)
    assert found["multus_build_info", ("python", found_python(found)), ("version", "1.2.3")] == 1
    assert found["process_resident_memory_bytes",] > 1_000_000
    assert found["process_cpu_seconds_total",] > 0
    assert found["process_max_fds",] >= found["process_open_fds",] > 2
    assert 0 < time.time() - found["process_start_time_seconds",] < 86_400


def found_python(found):
    [labels] = [dict(labels) for (name, *labels) in found if name == "multus_build_info"]
    return labels["python"]


def test_attachments_that_a_gc_handled(metrics):
    metrics.collected.labels("success").inc(3)
    metrics.collected.labels("cancelled").inc(1)
    found = {
        dict(labels)["outcome"]: value
        for (name, *labels), value in samples(metrics).items()
        if name == "multus_gc_attachments_total"
    }
    assert found == {"success": 3, "skipped": 0, "error": 0, "other": 1}


def test_reviews(metrics):
    assert "multus_webhook_reviews_total" not in exposition(metrics)
    metrics.expect_reviews()
    metrics.reviews.labels("Pod", "warned").inc()
    metrics.reviews.labels("Secret", "error").inc()
    found = {
        labels: value
        for (name, *labels), value in samples(metrics).items()
        if "reviews" in name
        for labels in [tuple(labels)]
    }
    assert len(found) == (len(REVIEWED) + 1) * 4
    assert found[("kind", "Pod"), ("outcome", "warned")] == 1
    assert found[("kind", "other"), ("outcome", "error")] == 1


# --- what is asked at a scrape ---------------------------------------------------------------------------------------


def test_how_old_is_what_is_known(metrics):
    ages = iter((math.inf, 0.0, 61.5))
    metrics.measure("multus_informer_stale_seconds", lambda: {"pods": next(ages)})
    assert 'multus_informer_stale_seconds{resource="pods"} +Inf\n' in exposition(metrics)
    assert [sample(metrics, "multus_informer_stale_seconds", resource="pods") for _ in range(2)] == [0, 61.5]


def test_the_end_of_the_nodes_certificate(metrics):
    name = "multus_client_certificate_expiration_timestamp_seconds"
    ends: list[float | None] = [None]
    metrics.measure_one(name, lambda: ends[-1])
    assert name not in exposition(metrics)
    ends.append(1_900_000_000.0)
    assert sample(metrics, name) == 1_900_000_000


def test_of_failures_only_the_number_and_the_time_are_shown(metrics):
    name, labels = "multus_network_add_duration_seconds", {"network": "web/a", "outcome": "timeout"}
    metrics.network("web/a", "success", 0.3)
    metrics.network("web/a", "timeout", 30)
    metrics.network("web/a", "timeout", 0.1)
    found = samples(metrics)
    shown = {key: value for key, value in found.items() if key[0].startswith(name) and ("outcome", "timeout") in key}
    assert shown == {
        (f"{name}_bucket", ("le", "+Inf"), *sorted(labels.items())): 2,
        (f"{name}_count", *sorted(labels.items())): 2,
        (f"{name}_sum", *sorted(labels.items())): 30.1,
    }
    assert found[f"{name}_bucket", ("le", "1.0"), ("network", "web/a"), ("outcome", "success")] == 1


def test_requests_to_the_api_server(metrics):
    metrics.api_request("patch", "403")
    metrics.api_request("patch", "error")
    metrics.api_request("delete", "what?")
    metrics.measure_one("multus_network_statuses_pending", lambda: 7)
    assert sample(metrics, "multus_api_requests_total", verb="patch", code="403") == 1
    assert sample(metrics, "multus_api_requests_total", verb="patch", code="error") == 1
    assert sample(metrics, "multus_api_requests_total", verb="other", code="other") == 1
    assert sample(metrics, "multus_network_statuses_pending") == 7


def test_a_question_that_fails_takes_nothing_else_along(metrics, caplog):
    def fail():
        raise OSError("no such thing")

    metrics.measure("multus_attachments", fail)
    metrics.measure("multus_ready", lambda: {"socket": True})
    assert sample(metrics, "multus_ready", condition="socket") == 1
    assert "multus_attachments" not in exposition(metrics)
    assert caplog.text.count("multus_attachments cannot be determined: OSError: no such thing") == 1


# --- the formats -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("", False),
        ("*/*", False),
        (PROMETHEUS, True),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=2.0.0; escaping=values", True),
        ("application/openmetrics-text; version=x", False),
        ("text/plain; version=1.0.x", False),
        ("text/plain; version=1.0.0; escaping=allow-utf-8", False),
        ("application/vnd.google.protobuf;q=0.9,text/plain", False),
        (", ;;q=,=" * 1000, False),
    ],
)
def test_the_format_is_one_that_the_client_takes(metrics, accept, openmetrics):
    kind = "application/openmetrics-text; version=1.0.0" if openmetrics else "text/plain; version=0.0.4"
    assert metrics.render(accept)[1] == f"{kind}; charset=utf-8"


def test_an_exemplar_names_the_request(metrics):
    metrics.verb("DEL", "success", 0.07, exemplar={"request_id": "1f2e3d4c", "trace_id": "ab" * 16})
    found = {
        (item.labels["verb"], item.labels["le"]): item.exemplar
        for family in parse_openmetrics(metrics.render(PROMETHEUS)[0].decode())
        for item in family.samples
        if item.exemplar
    }
    [(place, exemplar)] = found.items()
    assert "1f2e3d4c" not in exposition(metrics)
    assert place == ("DEL", "0.1")
    assert exemplar.labels == {"request_id": "1f2e3d4c", "trace_id": "ab" * 16}
    assert exemplar.value == 0.07
    assert abs(float(exemplar.timestamp) - time.time()) < 60


def filled(metrics, networks=100, plugins=16, failing=10):
    """Record what a node with 250 pods sees: each of its networks and plugins in use, and some `failing`."""
    names = [f"namespace-{number}/network-{number}" for number in range(networks)]
    for verb in VERBS:
        metrics.verb(verb, "success", 0.1, dict.fromkeys(STAGES, 0.01), {"request_id": "1f2e3d4c"})
        metrics.process_waits.labels(verb).observe(0.1)
    for ended in ("error", "refused", "timeout", "cancelled"):
        metrics.verb("ADD", ended, 0.1)
        metrics.verb("DEL", ended, 0.1)
    for number in range(plugins):
        for verb in ("ADD", "DEL", "CHECK"):
            metrics.plugin(f"plugin-{number}", verb, "success", 0.1)
    for name in names:
        metrics.network(name, "success", 0.1)
    for number in range(failing):
        metrics.network(names[number], "error", 0.1)
        metrics.plugin(f"plugin-{number % 4}", "ADD", "error", 0.1)
    for verb in ("get", "list", "watch", "patch", "put", "post"):
        for code in ("200", "403", "500", "error"):
            metrics.api_request(verb, code)
    for handler in ("/cni", "/delegate", "/healthz", "/readyz", "/admin"):
        # A question about health is never wrong.
        for status in (200,) if handler.endswith("z") else (200, 400):
            metrics.request(handler, status, "GET")
    metrics.measure("multus_attachments", lambda: dict.fromkeys(names, 250))
    metrics.measure("multus_attachments_broken", lambda: {names[0]: 1})
    metrics.repairs.labels("success").inc()
    metrics.hotplugged.labels("ADD", "success").inc()
    # A network has addresses of the node, or of the cluster.
    metrics.measure("multus_ipam_used_ratio", lambda: dict.fromkeys(names[::2], 0.5))
    metrics.measure("multus_address_range_used_ratio", lambda: dict.fromkeys(names[1::2], 0.5))
    metrics.measure_one("multus_addresses_taken", lambda: 0)
    metrics.measure_traffic(lambda: {(name,): [2**40] * len(TRAFFIC) for name in names})
    metrics.measure(
        "multus_ready", lambda: dict.fromkeys(("socket", "pods", "networks", "primary", "runtime", "certificate"), True)
    )
    metrics.measure("multus_degraded", lambda: {"interfaces": True})
    metrics.measure("multus_log_lines_dropped_total", lambda: {"stderr": 0, "file": 0})
    metrics.measure("multus_informer_stale_seconds", lambda: {"pods": 0, "networks": 0})
    metrics.measure_one("multus_network_statuses_pending", lambda: 0)
    metrics.measure_one("multus_client_certificate_expiration_timestamp_seconds", lambda: 1_900_000_000)


def test_a_large_node_has_less_than_3100_series(metrics):
    filled(metrics)
    found = samples(metrics)
    assert 2500 < len(found) < 2800
    shown = {name for name, *_ in found}
    missing = {item.name for item in DECLARED if not shown & {item.name, f"{item.name}_count"}}
    assert missing == {"multus_webhook_reviews_total"}


def test_also_if_every_network_fails(metrics):
    filled(metrics, failing=100)
    assert len(samples(metrics)) <= 3100


# --- outcomes --------------------------------------------------------------------------------------------------------


def caused(error, *causes):
    """Return `error` with a chain of causes."""
    last = error
    for cause in causes:
        last.__cause__ = cause
        last = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        *((CniError("x", code=code), "refused") for code in (1, 2, 3, 4, 6, 7, 8)),
        *((CniError("x", code=code), "error") for code in (5, 11, 50, 51, 100, 999)),
        (caused(TryAgainLaterError("x"), ExpiredError()), "timeout"),
        (caused(TryAgainLaterError("x"), TryAgainLaterError("y"), DeadlineExceededError(b"")), "timeout"),
        (caused(InvalidNetworkConfigError("x"), ExpiredError()), "refused"),
        (RuntimeError("x"), "error"),
        (asyncio.CancelledError(), "cancelled"),
        (Interrupted(), "timeout"),
    ],
)
def test_outcomes(error, expected):
    assert outcome_of(error) == expected
    assert expected in OUTCOMES


def test_an_interruption_of_work_that_was_stopped():
    limit = Deadline()
    limit.stop()
    with deadline.given(limit):
        assert outcome_of(Interrupted()) == "cancelled"
