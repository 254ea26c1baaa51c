"""KubeVirt asks for interfaces named by a hash of the network, in any order: each network has the name it was given.

kubevirt/kubevirt#8899; kind: keys and values of a selection element.
"""

from tests.reports.conftest import Site

NAMES = {"blue": "pod16477688c0e", "red": "podb1f51a511f1"}


def test_each_has_its_name(site: Site) -> None:
    elements = [
        f'{{"name": "{name}", "namespace": "{site.namespace}", "interface": "{link}"}}' for name, link in NAMES.items()
    ]
    for name in NAMES:
        site.vendor(name)
    site.add(f"[{','.join(elements)}]")
    shown = {entry["name"]: entry["interface"] for entry in site.status[1:]}
    assert shown == {f"{site.namespace}/{name}": link for name, link in NAMES.items()}
    assert site.links() == ["eth0", *sorted(NAMES.values())]
