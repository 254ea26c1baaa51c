"""Which variables ask for spans, and what is said where none can be sent. `tests/system/test_tracing.py` sends some."""

import logging
import sys

import pytest

from multus_daemon import tracing

# In a process that has loaded `cluster.kube.library` before, unlike the daemon.
pytestmark = pytest.mark.filterwarnings("ignore:urllib3 is loaded whole:ImportWarning")

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", **ENDPOINT}, False),
        ({"OTEL_TRACES_EXPORTER": "zipkin", **ENDPOINT}, False),
        ({"OTEL_SDK_DISABLED": "TRUE", **ENDPOINT}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_SERVICE_NAME": "multus"}, False),
    ],
)
def test_spans_are_wanted_where_an_endpoint_or_the_exporter_is_named(environ, wanted):
    assert tracing.is_wanted(environ) is wanted


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_another_protocol_is_refused_with_one_line(name, caplog):
    assert tracing.start(ENDPOINT | {name: "grpc"}, version="1") is None
    [record] = caplog.records
    assert record.getMessage() == (
        "no spans are sent: OTEL_EXPORTER_OTLP_PROTOCOL is grpc; only http/protobuf is supported"
    )


def test_a_library_that_is_not_installed_is_one_line(monkeypatch, caplog):
    # As Python has it for a module that must not be imported.
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert tracing.start(ENDPOINT, version="1") is None
    [record] = caplog.records
    assert (record.levelno, record.exc_info) == (logging.WARNING, None)
    assert record.getMessage().startswith("no spans are sent: install multus-daemon[tracing], or unset the variables")


def test_a_malformed_variable_is_one_line(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")
    assert tracing.start(ENDPOINT, version="1") is None
    [record] = caplog.records
    assert record.getMessage().startswith("no spans are sent: the variables OTEL_* can't be used: ValueError: ")
