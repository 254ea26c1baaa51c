"""The largest input of each key keeps nobody waiting: the event loop goes on, and /healthz answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz import largest
from tests.namespaces import make_at, remove_netns
from tests.netns.conftest import new_host

REFUSED = {
    "annotation, too many": "networks, and at most 256 are allowed",
    "ips, too many": "addresses, and at most 256 are allowed (network web/n)",
    "cni-args, ips, too many": "addresses, and at most 256 are allowed (network web/n)",
    "default-route": "gateways, and at most 16 are allowed",
    "plugins, too many": "plugins, and at most 64 are allowed",
    "objects, too many": "more than 20000 objects and arrays",
    "static: addresses": "addresses, and at most 4096 are allowed",
    "host-local: range sets": "range sets, and at most 4096 are allowed",
}
SERVED = (
    *("annotation, short form", "annotation, elements", "ips", "ips, IPv6", "cni-args, ips", "plugins", "args"),
    *("static: routes", "static: dns", "host-local: a range set", "host-local: routes", "unknown keys", "numbers"),
)


@pytest.fixture
def netns(tmp_path: Path) -> Iterator[str]:
    with new_host():
        path = tmp_path / "netns"
        make_at(path)
        yield str(path)
        remove_netns(path)


@pytest.mark.parametrize("key", largest.KEYS)
def test_others_are_served_meanwhile(key: str, tmp_path: Path, netns: str) -> None:
    tries = itertools.count()
    found = largest.require_others_served(key, lambda: largest.measure(key, tmp_path / str(next(tries)), netns))
    assert found.statuses["DEL"] == 200
    if words := REFUSED.get(key):
        assert words in found.errors[0]["msg"]
    if key in SERVED:
        assert found.statuses == {"ADD": 200, "CHECK": 200, "DEL": 200}, found.errors


def test_the_target_measures(tmp_path: Path, netns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "PAUSE_MAX", 0.0)
    monkeypatch.setattr(largest, "SLOW", 0.0)
    with pytest.raises(AssertionError, match="annotation, short form"):
        largest.run(b"")
