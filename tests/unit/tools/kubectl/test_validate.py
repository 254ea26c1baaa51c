"""`kubectl multus validate`."""

import pytest

from multus_daemon.tools.kubectl import show, validate

GOOD = '{"cniVersion": "1.0.0", "name": "n", "type": "ptp", "ipam": {"type": "host-local", "subnet": "10.1.0.0/24"}}'


@pytest.fixture
def look(bench):
    async def run(namespace=""):
        return await validate.look(bench.cluster(), namespace=namespace)

    return run


async def test_networks_and_annotations(bench, look):
    bench.network("good", GOOD)
    bench.network("bad", '{"cniVersion": "1.0.0", "type": "ptp", "ipam": {"type": "host-local", "subnet": "10.1/24"}}')
    bench.network("broken", "{", namespace="other")
    for number in range(3):
        bench.pod(f"web-{number}", "good,nowhere")
    bench.pod("finished", "[5]", status={"phase": "Failed"})
    bench.pod("plain")
    found = await look()
    assert (found["schema"], found["objects"]) == (validate.SCHEMA, 6)
    subjects = {item["subject"]: item for item in found["findings"]}
    assert set(subjects) == {
        "NetworkAttachmentDefinition default/bad",
        "NetworkAttachmentDefinition other/broken",
        "Pod default/web-0",
    }
    assert subjects["NetworkAttachmentDefinition default/bad"]["severity"] == "error"
    assert "10.1/24" in subjects["NetworkAttachmentDefinition default/bad"]["problem"]
    assert "nowhere" in subjects["Pod default/web-0"]["problem"]
    assert (subjects["Pod default/web-0"]["alike"], subjects["Pod default/web-0"]["key"] != "") == (2, True)
    assert found["errors"] + found["warnings"] == len(found["findings"])
    # No node has anything to do with it.
    assert not any("/exec" in path or "/nodes" in path for _, path in bench.server.requests)


async def test_of_one_namespace(bench, look):
    bench.network("bad", "{")
    bench.network("good", GOOD, namespace="other")
    bench.pod("web", "default/bad", namespace="other")
    assert [item["subject"] for item in (await look("default"))["findings"]] == [
        "NetworkAttachmentDefinition default/bad"
    ]
    assert all("other/" in item["subject"] for item in (await look("other"))["findings"])


async def test_what_people_see(bench, look, capsys):
    bench.network("bad", "{")
    for number in range(2):
        bench.pod(f"web-{number}", "nowhere")
    show.validate(await look())
    shown = capsys.readouterr().out
    assert "error NetworkAttachmentDefinition default/bad: " in shown
    assert "Pod default/web-0 and 1 more: " in shown
    assert "networks and pods looked at: 3; " in shown
