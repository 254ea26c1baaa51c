import math

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from multus_daemon.metrics import Metrics


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def metrics(registry):
    return Metrics(registry, version="1.2.3")


def exposition(metrics):
    return metrics.render()[0].decode()


def samples(metrics, family):
    [found] = [item for item in text_string_to_metric_families(exposition(metrics)) if item.name == family]
    return found.samples


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
def test_handlers(registry, metrics, path, handler):
    metrics.request(path, 200, "GET")
    labels = {"handler": handler, "code": "200", "method": "get"}
    assert registry.get_sample_value("multus_server_request_total", labels) == 1


def test_unknown_methods_share_a_series(registry, metrics):
    metrics.request("/cni", 405, "BREW")
    metrics.request("/cni", 405, "brew2")
    labels = {"handler": "/cni", "code": "405", "method": "unknown"}
    assert registry.get_sample_value("multus_server_request_total", labels) == 2


def test_verbs_are_measured_in_seconds_from_milliseconds_on(registry, metrics):
    metrics.verb("ADD", "success", 0.0008)
    metrics.verb("ADD", "success", 45)
    buckets = {
        float(item.labels["le"]): item.value
        for item in samples(metrics, "multus_cni_request_duration_seconds")
        if item.name.endswith("_bucket")
    }
    assert buckets[0.001] == 1
    assert buckets[30] == 1
    assert buckets[60] == 2
    assert sorted(buckets)[-2:] == [120, math.inf]
    labels = {"verb": "ADD", "outcome": "success"}
    assert registry.get_sample_value("multus_cni_request_duration_seconds_sum", labels) == pytest.approx(45.0008)


def test_unknown_verbs_and_outcomes_share_a_series(registry, metrics):
    for number in range(100):
        metrics.verb(f"V{number}", f"o{number}", 1)
    labels = {"verb": "other", "outcome": "other"}
    assert registry.get_sample_value("multus_cni_request_duration_seconds_count", labels) == 100


def test_plugin_types_are_bounded(registry, metrics):
    for number in range(200):
        metrics.delegate(f"type{number}", "ADD", "success", 0.1)
    metrics.delegate("type0", "ADD", "success", 0.1)
    counts = {
        item.labels["type"]: item.value
        for item in samples(metrics, "multus_delegate_duration_seconds")
        if item.name.endswith("_count")
    }
    assert len(counts) == 65
    assert counts["other"] == 200 - 64
    assert counts["type0"] == 2


@pytest.mark.parametrize("plugin_type", ["x" * 10_000, 'a\n"b', "\ud800", ""])
def test_odd_plugin_types_do_no_harm(metrics, plugin_type):
    metrics.delegate(plugin_type, "ADD", "success", 0.1)
    [count] = [item for item in samples(metrics, "multus_delegate_duration_seconds") if item.name.endswith("_count")]
    assert len(count.labels["type"]) <= 64


def test_in_flight_counts_down_after_an_error_too(registry, metrics):
    def value():
        return registry.get_sample_value("multus_cni_requests_in_flight", {"verb": "ADD"})

    def work():
        with metrics.in_flight("ADD"), metrics.in_flight("ADD"):
            seen.append(value())
            raise KeyError

    seen = [value()]
    with pytest.raises(KeyError):
        work()
    assert [*seen, value()] == [0, 2, 0]


def test_the_rest(registry, metrics):
    metrics.refused_peer()
    text = exposition(metrics)
    assert "multus_refused_peers_total 1.0\n" in text
    assert 'version="1.2.3"' in text
    assert "process_resident_memory_bytes " in text
    assert "python_gc_objects_collected_total{" in text


def test_no_created_series(metrics):
    metrics.request("/cni", 200, "POST")
    metrics.verb("ADD", "success", 1)
    assert "_created" not in exposition(metrics)


def test_two_registries_do_not_meet(registry, metrics):
    Metrics(CollectorRegistry()).refused_peer()
    assert registry.get_sample_value("multus_refused_peers_total") == 0


def test_content_type(metrics):
    assert metrics.render()[1].startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize(
    ("outcome", "told"), [("success", "success"), ("11", "11"), ("crash", "crash"), ("4711", "other")]
)
def test_outcomes_of_plugins(registry, metrics, outcome, told):
    metrics.delegate("ptp", "ADD", outcome, 0.1)
    labels = {"type": "ptp", "verb": "ADD", "outcome": told}
    assert registry.get_sample_value("multus_delegate_duration_seconds_count", labels) == 1


def test_attachments_that_a_gc_came_upon(registry, metrics):
    metrics.collected("collected", 3)
    metrics.collected("nonsense", 1)
    found = {item.labels["outcome"]: item.value for item in samples(metrics, "multus_gc_attachments")}
    assert found == {"collected": 3, "left": 0, "failed": 0, "other": 1}


def test_processes(registry, metrics):
    seen = metrics.processes
    for verb in ("ADD", "DEL", "STATUS", "GC", "CHECK"):
        assert registry.get_sample_value("multus_delegate_processes_running", {"verb": verb}) == 0
        assert registry.get_sample_value("multus_delegate_processes_waiting", {"verb": verb}) == 0
        assert registry.get_sample_value("multus_delegate_waits_given_up_total", {"verb": verb}) == 0
    seen.allowed.set(6)
    seen.running.labels("ADD").inc()
    seen.waits.labels("ADD").observe(0.3)
    seen.given_up.labels("ADD").inc()
    assert registry.get_sample_value("multus_delegate_processes_limit") == 6
    assert registry.get_sample_value("multus_delegate_processes_running", {"verb": "ADD"}) == 1
    assert registry.get_sample_value("multus_delegate_wait_seconds_sum", {"verb": "ADD"}) == pytest.approx(0.3)
    assert registry.get_sample_value("multus_delegate_waits_given_up_total", {"verb": "ADD"}) == 1


def test_late_deletes(registry, metrics):
    seen = metrics.deletes
    for outcome in ("served", "failed", "rejected"):
        assert registry.get_sample_value("multus_spool_replays_total", {"outcome": outcome}) == 0
    for metric in (seen.given_up, seen.replaced_namespaces, seen.never_attached, seen.set_aside):
        metric.inc()
    seen.spooled.set(4)
    seen.orphans.labels("deleted").inc(3)
    seen.leftovers.labels("aside").set(4)
    seen.lacking.set(5)
    assert registry.get_sample_value("multus_spool_entries") == 4
    assert registry.get_sample_value("multus_deletes_given_up_total") == 1
    assert registry.get_sample_value("multus_replaced_namespaces_total") == 1
    assert registry.get_sample_value("multus_orphan_attachments_total", {"outcome": "deleted"}) == 3
    assert registry.get_sample_value("multus_networks_never_attached_total") == 1
    assert registry.get_sample_value("multus_containers_set_aside_total") == 1
    assert registry.get_sample_value("multus_leftover_containers", {"kind": "aside"}) == 4
    assert registry.get_sample_value("multus_pods_lacking_networks") == 5


def test_how_old_is_what_is_known(registry, metrics):
    name, labels = "multus_informer_stale_seconds", {"resource": "pods"}
    assert registry.get_sample_value(name, labels) is None
    ages = iter((math.inf, 0.0, 61.5))
    metrics.cluster.ask_staleness("pods", lambda: next(ages))
    assert 'multus_informer_stale_seconds{resource="pods"} +Inf\n' in exposition(metrics)
    assert [registry.get_sample_value(name, labels) for _ in range(2)] == [0, 61.5]


def test_the_end_of_the_nodes_certificate(registry, metrics):
    name = "multus_client_certificate_expiration_timestamp_seconds"
    assert name not in exposition(metrics)
    ends: list[float | None] = [None]
    metrics.cluster.ask_certificate(lambda: ends[-1])
    assert registry.get_sample_value(name) is None
    ends.append(1_900_000_000.0)
    assert f"{name} 1.9e+09\n" in exposition(metrics)
