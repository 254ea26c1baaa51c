"""A configuration laid over a network's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from multus_daemon.spec.cni import conf, overlay
from multus_daemon.spec.cni.errors import CniError, DecodingFailureError, InvalidNetworkConfigError

LISTED = {
    "cniVersion": "1.0.0",
    "name": "n",
    "plugins": [
        {"type": "a", "x": 1, "ipam": {"type": "static", "y": {"z": 1}}},
        {"type": "b", "x": 1},
        {"type": "a", "x": 1},
    ],
}


def laid(config: object, over: object) -> dict[str, Any]:
    made = overlay.overlaid(conf.parse(json.dumps(config).encode()), json.dumps(over).encode())
    found: dict[str, Any] = json.loads(made.raw)
    return found


def test_an_overlay_changes_the_first_plugin_of_its_type_key_by_key() -> None:
    found = laid(LISTED, {"plugins": [{"type": "a", "X": 2, "ipam": {"y": {"w": 3}}}, {"type": "b", "new": [1]}]})
    assert found["plugins"] == [
        {"type": "a", "X": 2, "ipam": {"type": "static", "y": {"z": 1, "w": 3}}},
        {"type": "b", "x": 1, "new": [1]},
        {"type": "a", "x": 1},
    ]
    assert laid(LISTED, {"type": "b", "x": {"y": 1}})["plugins"][1] == {"type": "b", "x": {"y": 1}}
    assert laid(LISTED, {}) == LISTED


def test_name_and_version_stay_the_networks() -> None:
    single = {"cniVersion": "1.0.0", "name": "n", "type": "a"}
    over = {"type": "a", "Name": "other", "cniVersion": "0.3.1", "prevResult": {}, "runtimeConfig": {}, "plugins": []}
    assert laid(single, over) == single
    forced = conf.with_version(conf.parse(json.dumps(single).encode()), "0.4.0")
    assert overlay.overlaid(forced, b'{"type":"a","x":1}').cni_version == "0.4.0"


@pytest.mark.parametrize(
    ("over", "kind", "words"),
    [
        (b'{"type":"c"}', InvalidNetworkConfigError, "the network has no plugin 'c'"),
        (b'{"plugins":[{"x":1}]}', InvalidNetworkConfigError, "the network has no plugin ''"),
        (b'{"type":"a","ipam":{"type":"dhcp"}}', InvalidNetworkConfigError, "ipam.type of plugin a cannot be changed"),
        (b'{"type":"b","ipam":{"type":"dhcp"}}', InvalidNetworkConfigError, "ipam.type of plugin b cannot be changed"),
        (b'{"type":"a","ipam":{"TYPE":"dhcp"}}', InvalidNetworkConfigError, "ipam.type of plugin a cannot be changed"),
        (b'{"plugins":[7]}', DecodingFailureError, "an object is needed"),
        (b'{"type":7}', DecodingFailureError, "type"),
        (b"{", DecodingFailureError, "CNI configuration"),
    ],
)
def test_an_overlay_chooses_no_plugin(over: bytes, kind: type[CniError], words: str) -> None:
    with pytest.raises(kind, match=words):
        overlay.overlaid(conf.parse(json.dumps(LISTED).encode()), over)
