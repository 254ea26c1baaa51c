"""DEL with less than ADD had.

Each section is one public report: what was seen, and what is right.
"""

from __future__ import annotations

import pytest

from tests.reports.conftest import Site

# --- cache file empty -------------------------------------------------------------------------------------------------
# A power failure left an empty file of upstream for a container, which no DEL could read: the pod ends, and what is
# unknown is kept. k8snetworkplumbingwg/multus-cni#1087.


@pytest.mark.parametrize("content", ["null", "[]"])
def test_a_file_that_names_no_network_ends_at_once(site: Site, content: str) -> None:
    (site.node.cni_dir / site.container).write_text(content)
    assert site.call("DEL").code == 0


@pytest.mark.parametrize("content", ["", '[{"Conf": {'])
def test_an_unreadable_one_is_named_and_the_pod_ends(site: Site, content: str) -> None:
    path = site.node.cni_dir / site.container
    path.write_text(content)
    answers = [site.call("DEL") for _ in range(5)]
    assert str(path) in answers[0].stdout.decode()
    assert answers[-1].code == 0
    assert path.exists()
    path.unlink()


# --- namespace gone at del --------------------------------------------------------------------------------------------
# The pod had failed and its namespace was gone at DEL, and no plugin was called: each is.
# k8snetworkplumbingwg/multus-cni#267.


@pytest.mark.parametrize("netns", ["/run/netns/never-was", "", None])
def test_every_plugin_gets_the_del(site: Site, netns: str | None) -> None:
    site.vendor("lan")
    site.add("lan")
    assert site.call("DEL", CNI_NETNS=netns).code == 0
    assert site.called("lan", "DEL")
    assert not site.record.exists()


# --- namespace of a process -------------------------------------------------------------------------------------------
# The namespace was that of a process under /proc, which had ended before the DEL: the DEL succeeds.
# kubernetes/kubernetes#57465.


def test_the_pod_starts_and_ends(site: Site) -> None:
    process = site.node.process_in(site.netns)
    path = f"/proc/{process.pid}/ns/net"
    site.network("net", {"cniVersion": "1.0.0", "type": "ptp", "ipam": site.ipam("10.77.0.0/24")})
    site.declare(default="net")
    try:
        assert site.call("ADD", CNI_NETNS=path).code == 0
        assert site.call("CHECK", CNI_NETNS=path).code == 0
    finally:
        process.kill()
        process.wait()
    assert site.call("DEL", CNI_NETNS=path).code == 0
    assert not site.record.exists()


# --- record missing ---------------------------------------------------------------------------------------------------
# After a reboot the runtime ended containers of which nothing was on disk, and each DEL failed: nothing is left to
# free. k8snetworkplumbingwg/multus-cni#25.


def test_a_del_of_an_unknown_container_succeeds(site: Site) -> None:
    assert site.call("DEL").code == 0
    assert site.call("DEL", CNI_NETNS="").code == 0


# --- uid missing at del -----------------------------------------------------------------------------------------------
# A runtime passed no pod UID, and the address was never freed: ADD and DEL work without it.
# k8snetworkplumbingwg/multus-cni#1168.


def test_the_plugin_gets_the_del(site: Site) -> None:
    site.vendor("lan")
    site.declare("lan")
    arguments = f"IgnoreUnknown=1;K8S_POD_NAMESPACE={site.namespace};K8S_POD_NAME={site.pod}"
    assert site.call("ADD", CNI_ARGS=arguments).code == 0
    assert site.call("DEL", CNI_ARGS=arguments).code == 0
    assert site.called("lan", "DEL")
