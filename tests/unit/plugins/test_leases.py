"""What the leases of a node cost before there is one, and their bounds."""

from __future__ import annotations

import threading

import pytest

from multus_daemon.plugins import leases as module
from multus_daemon.plugins.leases import Leases, NoLeaseError, Order, Owner
from multus_daemon.spec.cni.errors import IoFailureError, TryAgainLaterError

OWNER = Owner("c1", "lan", "eth0")


@pytest.fixture
def leases(tmp_path):
    made = Leases(tmp_path / "dhcp")
    yield made
    made.stop()


def order(netns="/nowhere"):
    return Order(OWNER, netns, "1-2-3", (3, 1), {})


def test_without_a_lease_there_is_no_thread(leases):
    before = threading.active_count()
    leases.begin()
    leases.release(OWNER)
    assert not leases.has(OWNER)
    assert "no DHCP lease" in leases.problem(OWNER)
    assert threading.active_count() == before


def test_a_node_has_a_limit(leases, monkeypatch):
    monkeypatch.setattr(module, "CLIENTS_MAX", 0)
    with pytest.raises(TryAgainLaterError, match="0 DHCP leases"):
        leases.acquire(order(), 1)


def test_a_namespace_that_is_not_there_is_the_problem(leases):
    with pytest.raises(NoLeaseError, match="No such file or directory"):
        leases.acquire(order(), 0.3)
    assert not leases.has(OWNER)


def test_a_file_that_cannot_be_removed_fails(leases, tmp_path):
    (tmp_path / "dhcp" / OWNER.file).mkdir(parents=True)
    with pytest.raises(IoFailureError, match="cannot be removed"):
        leases.release(OWNER)
