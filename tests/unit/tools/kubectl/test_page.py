"""docs/kubectl-multus.md describes the keys of every answer, and no others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from multus_tools.kubectl import addresses, nodes, pods
from tests.fakes.apiserver import Execution
from tests.unit.tools.kubectl.conftest import Bench, explain_reply, status_reply
from tests.unit.tools.kubectl.test_nodes_leaks import leak

PAGE: Final = (Path(__file__).resolve().parents[4] / "docs" / "kubectl-multus.md").read_text()
FREE: Final = ("gates", "degraded", "behind", "leftovers")
"""Objects whose keys are not those of the format, or are described with another answer."""


def keys(value: Any, free: Sequence[str] = FREE, above: str = "") -> Iterator[str]:
    """Yield the keys of an answer at every depth, but not of the objects that are `free`."""
    if isinstance(value, list):
        for item in value:
            yield from keys(item, free, above)
    elif isinstance(value, dict) and above not in free:
        for key, item in value.items():
            yield key
            yield from keys(item, free, key)


async def daemon(execution: Execution) -> None:
    request = {"verb": "ADD", "began": 5.0, "seconds": 0.1, "error": "bad", "step": "its turn"}
    errors = [{"verb": "ADD", "code": 7, "cause": "bad", "count": 1, "last": 5.0, "pod": "default/web"}]
    difference = {"pod": "default/web", "network": "default/blue", "interface": "net1", "difference": "it is down"}
    replies = {
        "status": status_reply(errors=errors, broken=1, differences=[difference]),
        "explain": explain_reply(problem="bad", requests=[request], leftovers=[leak("default/web")]),
        "attachments": {"schema": "multusctl.attachments/v1", "source": "daemon", "containers": [leak("default/web")]},
        "plugins": {"schema": "multusctl.plugins/v1", "plugins": []},
    }
    await execution.answer(replies[execution.words[1]])


async def test_the_page_has_the_keys_of_every_answer(bench: Bench) -> None:
    bench.node("node-a", daemon)
    bench.node("node-b")
    bench.network("blue", '{"cniVersion": "1.0.0", "type": "bridge"}')
    uid = bench.pod("web", "blue")
    bench.event("web", uid, "bad")
    bench.shared("lan", range="10.9.0.0/24")
    bench.reserve("10.9.0.1", "default/a", "node-a")
    bench.reserve("10.9.0.2", "default/b", "node-c")
    cluster = bench.cluster()
    answers = [
        await addresses.addresses(cluster, node="", address=""),
        await addresses.release(cluster, node="", address="", confirmed=False),
        await nodes.status(cluster),
        await nodes.networks(cluster, namespace="", name=""),
        await nodes.leaks(cluster, namespace=""),
        await pods.pods(cluster, namespace=""),
        await pods.why(cluster, namespace="default", name="web"),
    ]
    common = set(re.findall(r"`(\w+)`", PAGE.partition("Every object also has ")[2].partition(". An empty")[0]))
    for answer in answers:
        (block,) = re.findall(rf'(?s){{"schema": "{answer["schema"]}",.*?```', PAGE)
        assert set(keys(answer)) | common == set(re.findall(r'"(\w+)":', block)) | common, answer["schema"]
    assert set(keys({key: answers[2][key] for key in ("daemons", "unanswered", "notes")})) == common
