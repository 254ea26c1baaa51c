"""After a reboot the runtime ended containers of which nothing was on disk, and each DEL failed: nothing is left to
free.

k8snetworkplumbingwg/multus-cni#25; kind: DEL with less than ADD had.
"""

from tests.reports.conftest import Site


def test_a_del_of_an_unknown_container_succeeds(site: Site) -> None:
    assert site.call("DEL").code == 0
    assert site.call("DEL", CNI_NETNS="").code == 0
