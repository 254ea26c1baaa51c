"""The order of addresses; `tests/contract/test_host_local_reference.py` has any sequence of ADD and DEL."""

import pytest

from multus_daemon.plugins.builtin import host_local as plugin
from multus_daemon.plugins.builtin import host_local_config as config
from multus_daemon.plugins.builtin import host_local_store as store
from multus_daemon.spec.cni.errors import CniError


class Node:
    """A network's directory, and the configuration of all who ask for addresses."""

    def __init__(self, directory, *sets):
        self.directory = directory
        self.sets = [[{"subnet": text} if isinstance(text, str) else text for text in item] for item in sets]

    def add(self, container_id, *ips, meanwhile=()):
        """Addresses for the container; `meanwhile`: those that somebody takes without the lock."""
        fields = {"ipam": {"ranges": self.sets}, "runtimeConfig": {"ips": list(ips)}}
        settings = config.read(fields, name="n", cni_version="1.0.0")
        with store.locked(self.directory, store.Owner(container_id, "eth0"), patience=1.0) as leases:
            for address in meanwhile:
                (self.directory / address).touch()
            return [item.ip for item in plugin.allocate(settings, leases, container_id)]

    def mark(self, address):
        (self.directory / "last_reserved_ip.0").write_text(address)

    def owners(self):
        return {entry.name: entry.read_bytes() for entry in self.directory.iterdir() if entry.name[0].isdigit()}


def refused(node, *args, **kwargs):
    with pytest.raises(CniError) as caught:
        node.add(*args, **kwargs)
    assert caught.value.code == 999
    return caught.value.msg


def test_exhaustion_names_the_ranges(tmp_path):
    node = Node(tmp_path, ["10.0.0.0/30", "10.1.0.0/30"])
    assert [node.add(name)[0] for name in "ab"] == ["10.0.0.2", "10.1.0.2"]
    assert refused(node, "c") == (
        "failed to allocate for range 0: no IP addresses available in range set: 10.0.0.1-10.0.0.2,10.1.0.1-10.1.0.2"
    )
    (tmp_path / "10.0.0.2").unlink()
    assert node.add("c") == ["10.0.0.2"]


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        ("", "10.0.0.2"),
        ("10.0.0.254", "10.0.0.2"),
        ("10.0.0.1", "10.0.0.2"),
        ("10.0.0.100", "10.0.0.101"),
        ("10.0.0.255", "10.0.0.2"),
        ("192.168.0.1", "10.0.0.2"),
        ("garbage", "10.0.0.2"),
        ("fd00::5", "10.0.0.2"),
    ],
)
def test_where_the_walk_begins(tmp_path, mark, expected):
    node = Node(tmp_path, ["10.0.0.0/24"])
    node.mark(mark)
    assert node.add("a") == [expected]


def test_a_gateway_of_the_other_family_hides_nothing(tmp_path):
    # 10.0.0.2 and ::a00:2 are the same number.
    node = Node(tmp_path, [{"subnet": "10.0.0.0/29", "gateway": "::a00:2"}])
    assert [node.add(name)[0] for name in "ab"] == ["10.0.0.1", "10.0.0.2"]


def test_a_huge_range_costs_nothing(tmp_path):
    node = Node(tmp_path, ["fd00::/64"])
    assert [node.add(name)[0] for name in "ab"] == ["fd00::2", "fd00::3"]
    node.mark("fd00::ffff:ffff:ffff:ffff")
    assert node.add("c") == ["fd00::4"]


def test_a_failed_add_takes_nothing_and_leaves_what_is_older(tmp_path):
    node = Node(tmp_path, ["10.0.0.0/24"], ["10.1.0.0/30"])
    assert node.add("a") == ["10.0.0.2", "10.1.0.2"]
    # A request may give an interface more than one address of a set; then the second set has none left.
    before = node.owners()
    assert "failed to allocate for range 1: 10.1.0.2 has been allocated to a" in refused(node, "a", "10.0.0.77")
    assert node.owners() == before
    assert "failed to allocate for range 1: no IP addresses" in refused(node, "b")
    assert node.owners() == before


def test_requested(tmp_path):
    node = Node(tmp_path, ["10.0.0.0/24"], ["10.1.0.0/24"])
    assert node.add("a", "10.1.0.9", "10.0.0.7") == ["10.0.0.7", "10.1.0.9"]
    assert node.add("b", "10.1.0.10") == ["10.0.0.8", "10.1.0.10"]
    assert node.add("a", "10.1.0.20", "10.0.0.20") == ["10.0.0.20", "10.1.0.20"]


@pytest.mark.parametrize(
    ("ips", "message"),
    [
        (["10.0.0.1"], "failed to allocate for range 0: requested ip 10.0.0.1 is subnet's gateway"),
        (
            ["10.0.0.50"],
            "failed to allocate for range 0: requested IP address 10.0.0.50 is not available in range set "
            "10.0.0.1-10.0.0.254",
        ),
        (["10.9.0.5", "10.0.0.77"], "failed to allocate all requested IPs: 10.9.0.5"),
        (["10.0.0.77", "10.0.0.78", "10.0.0.77"], "failed to allocate all requested IPs: 10.0.0.78"),
    ],
)
def test_requested_refused(tmp_path, ips, message):
    node = Node(tmp_path, ["10.0.0.0/24"])
    node.add("other", "10.0.0.50")
    before = node.owners()
    assert refused(node, "a", *ips) == message
    assert node.owners() == before


def test_an_address_that_somebody_took_past_the_lock_is_passed_over(tmp_path):
    node = Node(tmp_path, ["10.0.0.0/24"])
    assert node.add("a", meanwhile=("10.0.0.2", "10.0.0.3")) == ["10.0.0.4"]
