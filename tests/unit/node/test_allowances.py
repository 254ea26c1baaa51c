from __future__ import annotations

import pytest

from multus_daemon.node.allowances import CONNECTIONS_MAX, automatic, connections
from multus_daemon.plugins.limit import MIB, Allowance

GIB = 1024 * MIB


@pytest.mark.weak_spot(35)
@pytest.mark.parametrize(
    ("memory", "host", "requests", "reason"),
    [
        (20 * MIB, 8 * GIB, 5, "the memory limit of 20 MiB"),
        (50 * MIB, 8 * GIB, 5, "the memory limit of 50 MiB"),
        (66 * MIB, 8 * GIB, 64, "the memory limit of 66 MiB"),
        (66 * MIB, None, 64, "the memory limit of 66 MiB"),
        (114 * MIB, 8 * GIB, 256, "no limit says less"),
        (512 * MIB, 8 * GIB, 256, "no limit says less"),
        (None, 8 * GIB, 256, "no limit says less"),
        (None, None, 256, "no limit says less"),
        (8 * GIB, 4 * GIB, 256, "no limit says less"),
    ],
)
def test_by_memory(memory: int | None, host: int | None, requests: int, reason: str) -> None:
    # A limit of processor time that allows for more changes nothing.
    for cores in (None, 2.0):
        assert automatic(memory, host, cores) == Allowance(requests, reason)


@pytest.mark.parametrize(
    ("cores", "memory", "requests", "reason"),
    [
        (0.1, None, 20, "the CPU limit of 0.1 cores"),
        (0.1, 128 * MIB, 20, "the CPU limit of 0.1 cores"),
        (0.1, 50 * MIB, 5, "the memory limit of 50 MiB"),
        (0.01, 512 * MIB, 5, "the CPU limit of 0.01 cores"),
        (1.0, 512 * MIB, 200, "the CPU limit of 1 cores"),
        (1.28, None, 256, "no limit says less"),
    ],
)
def test_by_processor_time(cores: float, memory: int | None, requests: int, reason: str) -> None:
    assert automatic(memory, 8 * GIB, cores) == Allowance(requests, reason)


@pytest.mark.parametrize(
    ("memory", "host", "most"),
    [
        (20 * MIB, 8 * GIB, 20),
        (50 * MIB, 8 * GIB, 20),
        (128 * MIB, 8 * GIB, 50),
        (512 * MIB, None, 201),
        (16 * GIB, 64 * GIB, CONNECTIONS_MAX),
        (8 * GIB, 8 * GIB, CONNECTIONS_MAX),
        (None, 8 * GIB, CONNECTIONS_MAX),
    ],
)
def test_connections_by_memory(memory: int | None, host: int | None, most: int) -> None:
    assert connections(memory, host) == most
