"""A network of a list left addresses and no links in its result, and had no entry: it has one, by its name.

k8snetworkplumbingwg/network-attachment-definition-client#75; kind: results of third parties.
"""

import json

from multus_daemon.spec.cni import result
from multus_daemon.spec.nad import status

PRINTED = {"cniVersion": "0.3.1", "ips": [{"version": "4", "address": "11.11.11.2/24"}], "dns": {}}


def test_the_network_has_an_entry_with_its_address() -> None:
    decoded = result.decode(json.dumps(PRINTED).encode(), "0.3.1")
    (entry,) = status.entries_for("default/ipvlan-net", "net1", decoded, cluster_network=False)
    assert (entry["name"], entry["ips"], entry["default"]) == ("default/ipvlan-net", ["11.11.11.2"], False)
