"""A network's object had no configuration, and a file of the node had: the file of that name is used.

k8snetworkplumbingwg/multus-cni#716; kind: configurations in files of the node.
"""

import json

from tests.reports.conftest import Site


def test_the_file_is_found_by_the_name_in_it(site: Site) -> None:
    directory = site.node.root / "conf.d"
    directory.mkdir(exist_ok=True)
    config = {"cniVersion": "1.0.0", "name": f"{site.namespace}-lan", "type": site.plugin("macvlan")}
    (directory / f"{site.namespace}.conf").write_text(json.dumps(config))
    site.network(f"{site.namespace}-lan", "")
    site.add(f"{site.namespace}-lan")
    assert site.links() == ["eth0", "net1"]
