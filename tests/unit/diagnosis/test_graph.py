"""The tree of what is attached, and its picture."""

import xml.etree.ElementTree

from multus_daemon.diagnosis import graph
from multus_daemon.tools.ctl import picture


def container(pod, *attachments):
    return {"pod": pod, "container": f"id-of-{pod}", "attachments": list(attachments)}


def attachment(network, interface, parent="", plugin="ptp", addresses=(), host=()):
    return {
        "network": network,
        "interface": interface,
        "parent": parent,
        "plugins": [{"type": plugin, "servedBy": "built-in"}],
        "addresses": list(addresses),
        "hostInterfaces": list(host),
    }


FOUND = graph.of(
    {
        "containers": [
            container(
                "default/a",
                attachment("cluster", "eth0", addresses=["10.1.0.2/24"], host=["veth1"]),
                attachment("default/blue", "net1", "br0", "bridge", host=["br0", "veth2"]),
            ),
            container("default/<b>", attachment("cluster", "eth0")),
        ]
    }
)


def test_networks_are_below_what_they_are_on():
    routed, bridge = FOUND["parents"]
    assert (routed["name"], [item["pod"] for item in routed["networks"][0]["interfaces"]]) == (
        "",
        ["default/a", "default/<b>"],
    )
    (network,) = bridge["networks"]
    assert (bridge["name"], network["name"], network["plugin"]) == ("br0", "default/blue", "bridge")
    # The bridge itself is no end of a pod's pair.
    assert network["interfaces"][0]["hostInterfaces"] == ["veth2"]


def test_the_picture_is_xml_with_every_pod():
    root = xml.etree.ElementTree.fromstring(picture.svg(FOUND))
    texts = [item.text or "" for item in root.iter("{http://www.w3.org/2000/svg}text")]
    for expected in ("routed", "br0", "cluster  (ptp)", "default/blue  (bridge)", "default/<b>  eth0"):
        assert any(text.startswith(expected) for text in texts), expected


def test_a_node_without_pods_has_a_picture_too():
    xml.etree.ElementTree.fromstring(picture.svg(graph.of({"containers": []})))
