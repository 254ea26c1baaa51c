"""The metrics that are measured when they are asked for: of the process, and of the traffic of pods' interfaces."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from multus_daemon.metrics.kinds import NETWORK, Declared, Label

PROCESS: Final = (
    Declared(
        "multus_build_info",
        "gauge",
        "Always 1",
        "Which nodes run which version?",
        (Label("version", most=1), Label("python", most=1)),
    ),
    Declared(
        "process_cpu_seconds_total",
        "counter",
        "Total user and system CPU time spent in seconds.",
        "How much processor time does the daemon take?",
    ),
    Declared(
        "process_resident_memory_bytes",
        "gauge",
        "Resident memory size in bytes.",
        "Does the daemon come near its memory limit?",
    ),
    Declared(
        "process_start_time_seconds",
        "gauge",
        "Start time of the process since unix epoch in seconds.",
        "When did the daemon start, and does it restart?",
    ),
    Declared("process_open_fds", "gauge", "Number of open file descriptors.", "Are descriptors scarce?"),
    Declared(
        "process_max_fds",
        "gauge",
        "Maximum number of open file descriptors.",
        "How many descriptors may the daemon have?",
    ),
)
TRAFFIC: Final = MappingProxyType(
    {
        "receive_packets": ("Packets that pods received", "How much do pods receive?"),
        "transmit_packets": ("Packets that pods sent", "How much do pods send?"),
        "receive_bytes": ("Bytes that pods received", "Which network is loaded by what pods receive?"),
        "transmit_bytes": ("Bytes that pods sent", "Which network is loaded by what pods send?"),
        "receive_errors": ("Packets with errors that pods received", "Is the path to the pods damaged?"),
        "transmit_errors": ("Packets that pods could not send because of errors", "Is the path from the pods damaged?"),
        "receive_drops": ("Received packets that were dropped", "Are pods too slow to take what they receive?"),
        "transmit_drops": ("Packets to send that were dropped", "Do pods send more than the path takes?"),
    }
)
"""Meaning and question of each figure of traffic by its part of the metric's name, from the pod's point of view."""


NETWORK_TRAFFIC: Final = tuple(
    Declared(f"multus_network_{name}_total", "counter", f"{what} on secondary interfaces", question, (NETWORK,))
    for name, (what, question) in TRAFFIC.items()
)
