"""A plugin that makes the pod's link, and the reference's of the same type, with the same bytes."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest

from multus_daemon.kernel import rare
from multus_daemon.kernel.links import Rtnl
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.spec.cni.errors import InternalError
from tests.netns import outcome, reference

MAC = "02:00:00:00:00:77"
V4 = {"address": "10.213.7.2/24", "gateway": "10.213.7.1"}
V6 = {"address": "fd21:7::2/64", "gateway": "fd21:7::1"}
DEFAULTS = [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]

Prepare = Callable[[Any, Any], None]
"""Makes what a host and a pod have before the ADD."""


@functools.cache
def _can_make(kind: str) -> bool:
    with contextlib.closing(Rtnl()) as kernel:
        return rare.can_make(kernel, kind)


def fails_and_leaves_nothing(
    plugin: Any, made: Call, host: Any, netns: Any, ipam: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """An ADD in which this method of `Rtnl` fails, of a plugin that makes its link before it asks for addresses."""
    before = everything(host, netns)

    def fail(*_arguments: Any, **_keys: Any) -> None:
        raise OSError(5, "no luck")

    monkeypatch.setattr(Rtnl, method, fail)
    with pytest.raises(InternalError, match="no luck"):
        plugin.add(made)
    assert everything(host, netns) == before
    assert ipam.verbs == (["ADD", "DEL"] if method == "batch" else [])


def needs_kind(kind: str) -> pytest.MarkDecorator:
    """Skips a test where the kernel has no such links."""
    return pytest.mark.skipif(not _can_make(kind), reason=_lacks(kind))


def require_kind(kind: str) -> None:
    """Skip the test where the kernel has no such links."""
    if not _can_make(kind):
        pytest.skip(_lacks(kind))


def _lacks(kind: str) -> str:
    return f"the kernel has no {kind} devices: run `make kernels`"


def config(plugin: str, addresses: Any = None, routes: Any = (), **keys: Any) -> dict[str, Any]:
    """A configuration; without addresses there is no IPAM plugin."""
    found: dict[str, Any] = {"cniVersion": "1.0.0", "name": "testnet", "type": plugin, **keys}
    if addresses is not None:
        found["ipam"] = {"type": "static", "addresses": addresses, "routes": list(routes)}
    return found


def with_master(netns: Any) -> None:
    """Give the namespace an uplink, `up0`, to a network behind it; its default route goes there."""
    netns.batch(
        "link add up0 mtu 1450 type veth peer name wire0",
        "link set up0 up",
        "link set wire0 up",
        "addr add 192.0.2.1/24 dev up0",
        "route add default via 192.0.2.254",
    )


def masters(keys: dict[str, Any]) -> Prepare:
    """Prepare the uplink where the configuration has its master."""

    def prepare(host: Any, pod: Any) -> None:
        with_master(host)
        if keys.get("linkInContainer"):
            with_master(pod)

    return prepare


def link_of(netns: Any, ifname: str = "eth0") -> Any:
    (link,) = netns.ip("-d", "link", "show", "dev", ifname)
    return link


def everything(host: Any, pod: Any) -> list[str]:
    lines = [f"host {line}" for line in reference.state(host)]
    # A bridge keeps a limit of ports that it had.
    lines += [re.sub(r', "tso_max_size": \d+', "", f"pod {line}") for line in reference.state(pod)]
    return [*lines, *(f"{name}: {link_of(pod, name).get('txqlen')}" for name in sorted(pod.links()))]


def _comparable(made: outcome.Outcome) -> Any:
    result = made.result or {}
    for item in result.get("interfaces", ()):
        mac = item.pop("mac")
        assert item.pop("sandbox")
        item["fixed"] = mac == MAC
    return result


def same(given: dict[str, Any], prepare: Prepare, another_host: Any, make_netns: Any, **options: Any) -> None:
    """Require that both leave the same state and result."""
    found = []
    for add in (outcome.of_reference, outcome.builtin):
        with another_host() as host:
            pod = make_netns()
            prepare(host, pod)
            made = add(given["type"], "ADD", pod.path, given, **options)
            assert made.msg == ""
            found.append((everything(host, pod), _comparable(made)))
    theirs, ours = found
    reference.require_same(ours[0], theirs[0])
    assert ours[1] == theirs[1]


def each_other(given: dict[str, Any], prepare: Prepare, host: Any, pod: Any, *, ours_adds: bool) -> None:
    """Require that one checks and removes what the other made."""
    prepare(host, pod)
    before = everything(host, pod)

    def run(verb: str, ours: bool, fields: dict[str, Any]) -> Any:
        call = outcome.builtin if ours else outcome.of_reference
        made = call(given["type"], verb, pod.path, fields)
        assert not made.failed, made.msg
        return made.result

    added = {**given, "prevResult": run("ADD", ours_adds, given)}
    run("CHECK", not ours_adds, added)
    run("DEL", not ours_adds, added)
    reference.require_same(everything(host, pod), before)


def refuse(given: dict[str, Any], prepare: Prepare, host: Any, make_netns: Any, **options: Any) -> outcome.Outcome:
    """Require that both refuse for the same reason, and that the built-in leaves nothing; return what it says."""
    ours_in, theirs_in = make_netns(), make_netns()
    prepare(host, ours_in)
    if reference.state(ours_in) != reference.state(theirs_in):
        prepare(make_netns(), theirs_in)
    before = everything(host, ours_in)
    ours = outcome.builtin(given["type"], "ADD", ours_in.path, given, **options)
    reference.require_same(everything(host, ours_in), before)
    theirs = outcome.of_reference(given["type"], "ADD", theirs_in.path, given, **options)
    if theirs.msg.endswith("Link not found"):
        assert "No such device" in ours.msg
    else:
        outcome.require_same_failure(ours, theirs)
    return ours
