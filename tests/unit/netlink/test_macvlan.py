import struct

from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from multus_daemon.netlink import macvlan


def decoded(body):
    message = ifinfmsg(struct.pack("=IHHII", 16 + len(body), 16, 0, 1, 0) + body)
    message.decode()
    return message


def test_all_of_it_is_what_another_library_reads():
    body = macvlan.description("veth0", 7, 9, mode="vepa", mtu=1400, mac="02:00:00:00:00:0a", broadcast_queue=5)
    message = decoded(body)
    names = ("IFLA_IFNAME", "IFLA_LINK", "IFLA_NET_NS_FD", "IFLA_MTU", "IFLA_ADDRESS")
    assert [message.get_attr(name) for name in names] == ["veth0", 7, 9, 1400, "02:00:00:00:00:0a"]
    assert message.get_nested("IFLA_LINKINFO", "IFLA_INFO_KIND") == "macvlan"
    assert message.get_nested("IFLA_LINKINFO", "IFLA_INFO_DATA", "IFLA_MACVLAN_MODE") == "vepa"
    assert struct.pack("=HHI", 8, 7, 5) in body


def test_what_is_not_said_is_not_sent():
    message = decoded(macvlan.description("veth0", 7, 9, mode="bridge"))
    assert [name for name, _ in message["attrs"]] == ["IFLA_IFNAME", "IFLA_LINK", "IFLA_NET_NS_FD", "IFLA_LINKINFO"]
