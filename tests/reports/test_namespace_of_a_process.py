"""The namespace was that of a process under /proc, which had ended before the DEL: the DEL succeeds.

kubernetes/kubernetes#57465; kind: DEL with less than ADD had.
"""

from tests.reports.conftest import Site


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
