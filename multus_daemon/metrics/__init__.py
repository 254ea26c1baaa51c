"""All metrics of the daemon: what they are (`declared`), their values (`registry`), and how callers record them.

Label values are bounded, whatever callers pass. Recording neither raises nor blocks. Only this package uses
prometheus_client.
"""

from multus_daemon.metrics.declared import OUTCOMES, REQUESTS, TRAFFIC, VERBS, Outcome
from multus_daemon.metrics.recording import (
    ClusterMetrics,
    DeleteMetrics,
    Metrics,
    PrimaryMetrics,
    ProcessMetrics,
    wants_openmetrics,
)

__all__ = [
    "OUTCOMES",
    "REQUESTS",
    "TRAFFIC",
    "VERBS",
    "ClusterMetrics",
    "DeleteMetrics",
    "Metrics",
    "Outcome",
    "PrimaryMetrics",
    "ProcessMetrics",
    "wants_openmetrics",
]
