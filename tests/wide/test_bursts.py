"""Upstream's manifest with our image: its limit of 50 MiB holds for burst after burst."""

from __future__ import annotations

import pytest

from tests.e2e.cluster import test_drop_in
from tests.e2e.cluster.multus import UpstreamPod
from tests.e2e.cluster.test_drop_in import burst

pytestmark = [pytest.mark.timeout(1500), test_drop_in.few_cpus]
pytest_plugins = ["tests.e2e.cluster.fixtures"]

drop_in = test_drop_in.drop_in


def test_three_bursts_of_pods_with_the_limits_of_the_manifest(drop_in: UpstreamPod) -> None:
    """After one burst, the daemon has memory for the next one."""
    for _ in range(3):
        burst(drop_in, "blue")
