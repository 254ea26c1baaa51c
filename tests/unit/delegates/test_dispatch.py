"""Dispatcher: which runner is chosen, and what the observer hears."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest

from multus_daemon.cni.errors import CniError, InvalidNetworkConfigError, TryAgainLaterError
from multus_daemon.delegates.dispatch import Dispatcher
from multus_daemon.delegates.find import PluginNotFoundError
from multus_daemon.netlink.ops import KernelLinks
from multus_daemon.ports import Invocation
from tests.fakes.runner import FakePluginRunner

OWN_NETNS = "/proc/self/ns/net"


def invocation(**changes) -> Invocation:
    """An ADD with a `served_by` of its own, which the dispatcher writes to."""
    return replace(Invocation("ADD", "c", "/n", "net1", "", "/a", b"{}"), **{"served_by": {}, **changes})


@pytest.fixture
def process():
    answers = {("both", "ADD"): b"process", ("binary", "ADD"): b"process"}
    return FakePluginRunner(answers, missing={"builtin", "none"}, where="/a/{}")


@pytest.fixture
def builtin():
    answers = {("both", "ADD"): b"built-in", ("builtin", "ADD"): b"built-in"}
    return FakePluginRunner(answers, missing={"binary", "none"}, where="built-in")


@pytest.mark.parametrize(
    ("mode", "name", "expected"),
    [
        ("off", "both", b"process"),
        ("off", "binary", b"process"),
        ("off", "builtin", None),
        ("fallback", "both", b"process"),
        ("fallback", "binary", b"process"),
        ("fallback", "builtin", b"built-in"),
        ("fallback", "none", None),
        ("prefer", "both", b"built-in"),
        ("prefer", "binary", b"process"),
        ("prefer", "builtin", b"built-in"),
        ("prefer", "none", None),
    ],
)
async def test_choice(process, builtin, mode, name, expected):
    dispatcher = Dispatcher(process, builtin, mode)
    if expected is None:
        with pytest.raises(PluginNotFoundError, match=f'^failed to find plugin "{name}" in path'):
            await dispatcher.run(name, invocation())
    else:
        assert await dispatcher.run(name, invocation()) == expected
    where = {None: "", b"process": f"/a/{name}", b"built-in": "built-in"}
    assert dispatcher.locate(name) == where[expected]


@pytest.mark.parametrize(
    ("mode", "name", "expected"),
    [
        ("off", "both", b"process"),
        ("fallback", "both", b"process"),
        ("prefer", "both", b"process"),
        # Nobody else could: it refuses, or does the DEL.
        ("prefer", "builtin", b"built-in"),
        ("fallback", "builtin", b"built-in"),
    ],
)
async def test_what_the_builtin_does_not_know_is_left_to_the_binary(process, builtin, mode, name, expected):
    builtin.not_supported = {"both": "newKey: 5", "builtin": "newKey: 5"}
    assert await Dispatcher(process, builtin, mode).run(name, invocation()) == expected
    assert len(process.calls) + len(builtin.calls) == (2 if mode == "fallback" and name == "builtin" else 1)


async def test_a_failing_binary_is_not_replaced(process, builtin):
    """Only a missing one is: a plugin that has begun its work must not be followed by another."""
    process.answers["both", "ADD"] = InvalidNetworkConfigError("bad subnet")
    with pytest.raises(InvalidNetworkConfigError, match="bad subnet"):
        await Dispatcher(process, builtin, "fallback").run("both", invocation())
    assert builtin.calls == []


@pytest.mark.parametrize(
    ("mode", "name", "verb", "netns", "ifname", "follows"),
    [
        ("fallback", "ptp", "DEL", "", "lo", True),
        ("fallback", "bridge", "DEL", "/run/netns/of-nobody", "lo", True),
        ("fallback", "bridge", "DEL", OWN_NETNS, "lo", False),
        # Its first DEL was killed when the interface was gone and the rules were not.
        ("fallback", "bridge", "DEL", OWN_NETNS, "gone0", True),
        ("fallback", "macvlan", "DEL", "", "lo", False),
        ("fallback", "ptp", "CHECK", "", "lo", False),
        ("off", "ptp", "DEL", "", "lo", False),
    ],
)
async def test_the_builtin_removes_what_a_reference_plugin_leaves_whose_interface_is_gone(
    process, builtin, monkeypatch, mode, name, verb, netns, ifname, follows
):
    async def existing(_self, path, ifnames):
        if path != OWN_NETNS:
            raise OSError("no namespace")
        return [name for name in ifnames if name == "lo"]

    monkeypatch.setattr(KernelLinks, "existing_links", existing)
    call = invocation(verb=verb, netns=netns, ifname=ifname)
    process.answers[name, verb] = b"binary"
    assert await Dispatcher(process, builtin, mode).run(name, call) == b"binary"
    assert process.order == [(name, verb)]
    assert builtin.order == ([(name, verb)] if follows else [])


async def test_rules_that_stay_do_not_fail_the_del(process, builtin, caplog):
    builtin.answers["ptp", "DEL"] = TryAgainLaterError("the lock of iptables is held")
    await Dispatcher(process, builtin, "fallback").run("ptp", invocation(verb="DEL", netns=""))
    assert "container c: rules that plugin ptp has left can't be removed: the lock" in caplog.text


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "success"),
        (TryAgainLaterError("x"), "11"),
        (asyncio.CancelledError(), "cancelled"),
        (RuntimeError("x"), "crash"),
    ],
)
async def test_observed(process, builtin, error, outcome):
    heard = []
    if error:
        process.answers["both", "ADD"] = error
    dispatcher = Dispatcher(process, builtin, "off", observe=lambda *args: heard.append(args))
    await asyncio.gather(dispatcher.run("both", invocation()), return_exceptions=True)
    [(plugin_type, verb, seen, seconds)] = heard
    assert (plugin_type, verb, seen) == ("both", "ADD", outcome)
    assert 0 <= seconds < 1


# --- CHECK and DEL by the one that did the ADD ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "name", "expected"),
    [
        ("off", "both", {"both": "/a/both"}),
        ("fallback", "both", {"both": "/a/both"}),
        ("fallback", "builtin", {"builtin": "built-in"}),
        ("prefer", "both", {"both": "built-in"}),
        ("prefer", "binary", {"binary": "/a/binary"}),
        ("prefer", "none", {}),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
async def test_the_add_is_recorded_also_where_it_fails(process, builtin, mode, name, expected, fails):
    call = invocation(served_by={})
    if fails:
        process.answers[name, "ADD"] = builtin.answers[name, "ADD"] = CniError("no", code=111)
    with contextlib.suppress(CniError):
        await Dispatcher(process, builtin, mode).run(name, call)
    assert call.served_by == expected


@pytest.mark.parametrize("verb", ["CHECK", "DEL"])
@pytest.mark.parametrize(
    ("mode", "name", "added_by", "ran", "replaced"),
    [
        ("prefer", "both", "/a/both", "process", False),
        ("prefer", "both", "binary", "process", False),
        ("prefer", "both", "/elsewhere/both", "process", False),
        ("prefer", "builtin", "/a/builtin", "builtin", True),
        ("fallback", "both", "built-in", "builtin", False),
        ("fallback", "builtin", "built-in", "builtin", False),
        ("fallback", "builtin", "/a/builtin", "builtin", True),
        # Never is never.
        ("off", "both", "built-in", "process", True),
        # A built-in that this daemon does not have.
        ("prefer", "binary", "built-in", "process", True),
        # Nobody knows: as an ADD.
        ("prefer", "both", "", "builtin", False),
        ("fallback", "both", "", "process", False),
    ],
)
async def test_who_did_the_add_does_the_rest(process, builtin, caplog, verb, mode, name, added_by, ran, replaced):
    call = invocation(verb=verb, served_by={name: added_by} if added_by else {})
    await Dispatcher(process, builtin, mode).run(name, call)
    # A binary that is not there has been asked for.
    asked = {"process": [(name, verb)], "builtin": []} if ran == "process" else {"builtin": [(name, verb)]}
    assert builtin.order == asked["builtin"]
    if "process" in asked:
        assert process.order == asked["process"]
    assert ("is not to be had" in caplog.text) == replaced


async def test_a_new_add_does_not_go_by_the_last_one(process, builtin):
    call = invocation(served_by={"both": "/a/both"})
    assert await Dispatcher(process, builtin, "prefer").run("both", call) == b"built-in"
    assert call.served_by == {"both": "built-in"}


async def test_what_the_recorded_builtin_does_not_know_is_left_to_the_binary(process, builtin):
    builtin.not_supported = {"both": "newKey: 5"}
    call = invocation(verb="DEL", served_by={"both": "built-in"})
    await Dispatcher(process, builtin, "prefer").run("both", call)
    assert (process.order, builtin.order) == ([("both", "DEL")], [])


# --- types that the binary serves whatever the mode is ----------------------------------------------------------------


@pytest.mark.parametrize("verb", ["ADD", "STATUS", "GC", "CHECK", "DEL"])
@pytest.mark.parametrize("mode", ["prefer", "fallback", "off"])
async def test_an_excepted_type_is_its_binarys(process, builtin, mode, verb):
    dispatcher = Dispatcher(process, builtin, mode, excepted=["both"])
    await dispatcher.run("both", invocation(verb=verb))
    assert (process.order, builtin.order) == ([("both", verb)], [])
    assert dispatcher.locate("both") == "/a/both"
    assert dispatcher.shadowed(["both"]) == {}


@pytest.mark.parametrize("mode", ["prefer", "fallback"])
async def test_an_excepted_type_without_its_binary_is_not_to_be_had(process, builtin, mode):
    dispatcher = Dispatcher(process, builtin, mode, excepted=["builtin"])
    assert dispatcher.locate("builtin") == ""
    for call in (invocation(), invocation(verb="DEL", served_by={"builtin": "/a/builtin"})):
        with pytest.raises(PluginNotFoundError):
            await dispatcher.run("builtin", call)
    assert builtin.calls == []


@pytest.mark.parametrize("verb", ["CHECK", "DEL"])
async def test_what_a_builtin_made_before_the_exception_is_its_own(process, builtin, verb):
    dispatcher = Dispatcher(process, builtin, "prefer", excepted=["both"])
    await dispatcher.run("both", invocation(verb=verb, served_by={"both": "built-in"}))
    assert (process.order, builtin.order) == ([], [("both", verb)])


async def test_what_the_binary_of_an_excepted_type_leaves_is_its_own(process, builtin):
    process.missing.discard("bridge")
    await Dispatcher(process, builtin, "prefer", excepted=["bridge"]).run("bridge", invocation(verb="DEL", netns=""))
    assert builtin.calls == []


async def test_other_types_go_by_the_mode(process, builtin):
    assert await Dispatcher(process, builtin, "prefer", excepted=["bridge"]).run("both", invocation()) == b"built-in"


@pytest.mark.parametrize(("mode", "expected"), [("prefer", {"both": "/a/both"}), ("fallback", {}), ("off", {})])
def test_shadowed(process, builtin, mode, expected):
    assert Dispatcher(process, builtin, mode).shadowed(["both", "binary", "builtin", "none"]) == expected
