import pytest

from multus_daemon.cluster.kube.connect import resolve_node_name
from multus_daemon.runtime.aio import StartError


async def test_the_variable_needs_no_request(server, client):
    assert await resolve_node_name(client, {"MULTUS_NODE_NAME": "variable"}, "host") == "variable"
    assert not server.requests


async def test_host_name_that_the_cluster_knows(server, client):
    server.put("nodes", {"metadata": {"name": "host-1.example"}})
    assert await resolve_node_name(client, {}, "Host-1.example\n") == "host-1.example"
    assert server.requests == [("GET", "/api/v1/nodes/host-1.example")]


@pytest.mark.weak_spot(40)
@pytest.mark.parametrize("status", [0, 403, 503])
async def test_refused_with_the_remedy(server, client, status):
    if status:
        server.fail(status)
    with pytest.raises(StartError, match="set MULTUS_NODE_NAME"):
        await resolve_node_name(client, {}, "host")


@pytest.mark.parametrize("hostname", ["", "../x", "a b"])
async def test_host_names_that_no_node_has(server, client, hostname):
    with pytest.raises(StartError, match="MULTUS_NODE_NAME"):
        await resolve_node_name(client, {}, hostname)
    assert not server.requests


async def test_what_is_set_must_be_a_name(client):
    with pytest.raises(StartError, match="MULTUS_NODE_NAME: 'A B' must consist"):
        await resolve_node_name(client, {"MULTUS_NODE_NAME": "A B"}, "host")
