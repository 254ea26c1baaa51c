"""The largest legal object of each kind does not stop the event loop, with all who follow its changes."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from multus_daemon.cluster.kube.claims import decode_slice
from multus_daemon.spec.nad.selection import ANNOTATION_MAX_BYTES, NETWORKS_ANNOTATION
from tests.following import followed_store
from tests.fuzz import largest

ANNOTATIONS = ANNOTATION_MAX_BYTES - 4096
OBJECT = 1_400_000
"""Bytes; etcd takes 1.5 MiB."""
PAUSE_MAX = 0.05
SLOW = 10
"""On a slow machine the bound is this many times what the object takes to be decoded as plain JSON."""


def _pod(annotations: dict[str, str], **spec: Any) -> dict[str, Any]:
    metadata = {"namespace": "web", "name": "web-1", "uid": "u", "annotations": annotations}
    return {"metadata": metadata, "spec": {"nodeName": "node-a", "containers": [], **spec}}


def _asks(text: str) -> dict[str, str]:
    return {NETWORKS_ANNOTATION: text}


PODS = {
    **{key: _pod(_asks(value.text())) for key, value in largest.KEYS.items() if value.in_annotation},
    "nested": _pod(_asks('[{"name":"n","cni-args":{"x":' + "[" * 60_000 + "]" * 60_000 + "}}]")),
    "no JSON": _pod(_asks("{" * ANNOTATIONS)),
    "annotations": _pod({f"a.example/k{number}": "" for number in range(ANNOTATIONS // 16)}),
    "containers": _pod({}, containers=[{"image": "x" * 60, "resources": {"limits": {"a.example/x": 1}}}] * 10_000),
    "volumes": _pod({}, volumes=[{"name": "v", "hostPath": {"path": "/x"}}] * 25_000),
    "claims": _pod({}, resourceClaims=[{"name": f"c{number}", "resourceClaimName": "c"} for number in range(20_000)]),
}
NETWORKS = {
    "config": {"metadata": {"namespace": "web", "name": "n"}, "spec": {"config": "x" * OBJECT}},
    "many keys": {
        "metadata": {"namespace": "web", "name": "n"},
        "spec": {"config": json.dumps({f"k{number}": [] for number in range(90_000)})},
    },
}
_ATTRIBUTES = {f"a.example/{number:024}": {"string": "x" * 64} for number in range(32)}
SLICES = {
    "devices": {
        "metadata": {"name": "s"},
        "spec": {
            "driver": "d",
            "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": f"d{number}", "attributes": _ATTRIBUTES} for number in range(128)],
        },
    }
}
OBJECTS = [
    *(("pods", name, item) for name, item in PODS.items()),
    *(("networks", name, item) for name, item in NETWORKS.items()),
    *(("slices", name, item) for name, item in SLICES.items()),
]


def _seconds(work: Callable[[], object]) -> float:
    # A collection of garbage would be of what other tests have made.
    gc.disable()
    try:
        began = time.process_time()
        work()
        return time.process_time() - began
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("kind", "item"), [item[::2] for item in OBJECTS], ids=[" ".join(item[:2]) for item in OBJECTS]
)
async def test_the_event_loop_goes_on(kind: str, item: dict[str, Any]) -> None:
    worst = []
    # A collection of garbage may come in any of them.
    for _ in range(3):
        store = await followed_store()
        takes: dict[str, Callable[[bytes], object]] = {
            "pods": store.pods._take,
            "networks": store.networks._take,
            "slices": decode_slice,
        }
        lines = [_line(item, version) for version in ("1", "2")]
        if kind == "slices":
            lines = [json.dumps(item).encode()]
        found = max(_seconds(partial(takes[kind], line)) for line in lines)
        assert kind == "slices" or len(getattr(store, kind)) == 1
        bound = max(PAUSE_MAX, SLOW * _seconds(partial(msgspec.json.decode, lines[0])))
        if found <= bound:
            return
        worst.append((found, bound))
    raise AssertionError(worst)


def _line(item: dict[str, Any], version: str) -> bytes:
    """Return the line of a watch with the item, changed by the version."""
    metadata = item["metadata"]
    annotations = metadata.get("annotations", {}) | {"changed": version}
    changed = item | {"metadata": metadata | {"resourceVersion": version, "annotations": annotations}}
    return json.dumps({"type": "MODIFIED", "object": changed}).encode()
