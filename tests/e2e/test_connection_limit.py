"""`connectionLimit`: so many requests are worked on at once, the others wait for their turn."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.node import Node


@pytest.mark.conformance("e2e-5")
def test_six_pods_at_once_with_a_limit_of_one(node: Node) -> None:
    # Fails where two of it run at once.
    waits = f"until [ -e {node.root}/$CNI_COMMAND ]; do sleep 0.05; done"
    alone = f"mkdir {node.root}/taken || exit 1; {waits}; rmdir {node.root}/taken"
    node.plugin("alone", f"""{alone}; [ "$CNI_COMMAND" != ADD ] || echo '{{"cniVersion": "1.0.0"}}'""")
    node.network("alone", {"cniVersion": "1.0.0", "name": "alone", "type": "alone"}, "default")
    node.settings["connectionLimit"] = 1
    names = [f"p{number}" for number in range(6)]
    for name in names:
        node.pod(name, "alone")
    node.start()
    spaces = {name: node.add_netns() for name in names}
    with ThreadPoolExecutor(len(names)) as pool:
        for verb in ("ADD", "DEL"):
            answers = [pool.submit(node.cni, verb, f"c-{name}", spaces[name], name) for name in names]
            try:
                assert node.get("/healthz")[0] == 200, "probes do not wait"
                assert not any(answer.done() for answer in answers)
            finally:
                (node.root / verb).touch()
            assert [answer.result().stdout for answer in answers if answer.result().code] == []
    assert node.leftovers() == []
