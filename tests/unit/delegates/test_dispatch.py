"""Dispatcher: which runner is chosen, and what the observer hears."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from multus_daemon.cni.errors import InvalidNetworkConfigError, TryAgainLaterError
from multus_daemon.delegates.dispatch import Dispatcher
from multus_daemon.delegates.find import PluginNotFoundError
from multus_daemon.ports import Invocation
from tests.fakes.runner import FakePluginRunner

CALL = Invocation("ADD", "c", "/n", "net1", "", "/a", b"{}")
OWN_NETNS = "/proc/self/ns/net"


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
            await dispatcher.run(name, CALL)
    else:
        assert await dispatcher.run(name, CALL) == expected
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
    assert await Dispatcher(process, builtin, mode).run(name, CALL) == expected
    assert len(process.calls) + len(builtin.calls) == (2 if mode == "fallback" and name == "builtin" else 1)


async def test_a_failing_binary_is_not_replaced(process, builtin):
    """Only a missing one is: a plugin that has begun its work must not be followed by another."""
    process.answers["both", "ADD"] = InvalidNetworkConfigError("bad subnet")
    with pytest.raises(InvalidNetworkConfigError, match="bad subnet"):
        await Dispatcher(process, builtin, "fallback").run("both", CALL)
    assert builtin.calls == []


@pytest.mark.parametrize(
    ("mode", "name", "verb", "netns", "follows"),
    [
        ("fallback", "ptp", "DEL", "", True),
        ("fallback", "bridge", "DEL", "/run/netns/of-nobody", True),
        ("fallback", "bridge", "DEL", OWN_NETNS, False),
        ("fallback", "macvlan", "DEL", "", False),
        ("fallback", "ptp", "CHECK", "", False),
        ("off", "ptp", "DEL", "", False),
    ],
)
async def test_the_builtin_removes_what_a_reference_plugin_leaves_in_a_namespace_that_is_gone(
    process, builtin, mode, name, verb, netns, follows
):
    call = replace(CALL, verb=verb, netns=netns)
    process.answers[name, verb] = b"binary"
    assert await Dispatcher(process, builtin, mode).run(name, call) == b"binary"
    assert process.order == [(name, verb)]
    assert builtin.order == ([(name, verb)] if follows else [])


async def test_rules_that_stay_do_not_fail_the_del(process, builtin, caplog):
    builtin.answers["ptp", "DEL"] = TryAgainLaterError("the lock of iptables is held")
    await Dispatcher(process, builtin, "fallback").run("ptp", replace(CALL, verb="DEL", netns=""))
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
    await asyncio.gather(dispatcher.run("both", CALL), return_exceptions=True)
    [(plugin_type, verb, seen, seconds)] = heard
    assert (plugin_type, verb, seen) == ("both", "ADD", outcome)
    assert 0 <= seconds < 1
