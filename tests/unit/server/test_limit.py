from __future__ import annotations

import pytest

from multus_daemon.delegates.limit import MIB, Allowance
from multus_daemon.server.limit import automatic

GIB = 1024 * MIB


@pytest.mark.weak_spot(35)
@pytest.mark.parametrize(
    ("memory", "host", "requests", "reason"),
    [
        (20 * MIB, 8 * GIB, 5, "the memory limit of 20 MiB"),
        (50 * MIB, 8 * GIB, 5, "the memory limit of 50 MiB"),
        (66 * MIB, 8 * GIB, 64, "the memory limit of 66 MiB"),
        (66 * MIB, None, 64, "the memory limit of 66 MiB"),
        (114 * MIB, 8 * GIB, 256, "the memory limit of 114 MiB"),
        (512 * MIB, 8 * GIB, 256, "the memory limit of 512 MiB"),
        (None, 8 * GIB, 256, "no memory limit"),
        (None, None, 256, "no memory limit"),
        (8 * GIB, 4 * GIB, 256, "no memory limit"),
    ],
)
def test_automatic(memory: int | None, host: int | None, requests: int, reason: str) -> None:
    assert automatic(memory, host) == Allowance(requests, reason)
