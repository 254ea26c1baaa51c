"""Plugins: which implementation is chosen, and what the observer hears."""

from __future__ import annotations

import contextlib
import ipaddress
import threading
import time
from dataclasses import replace

import pytest

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins import select
from multus_daemon.plugins.builtin.registry import MODELS, PLUGINS, Builtin
from multus_daemon.plugins.find import Build, PluginIsMultusError, PluginNotFoundError
from multus_daemon.plugins.select import Plugins
from multus_daemon.runtime.deadline import Interrupted
from multus_daemon.spec.attachment import BUILT_IN, Invocation
from multus_daemon.spec.cni.errors import (
    CniError,
    InvalidNetworkConfigError,
    IoFailureError,
    TryAgainLaterError,
    UnsupportedFieldError,
)
from multus_daemon.spec.cni.result import Interface, IpConfig, Result
from tests import calls
from tests.fakes.runner import FakeModule, FakePluginRunner, FakePrograms

OWN_NETNS = "/proc/self/ns/net"


def invocation(**changes) -> Invocation:
    """An ADD for which nothing has been chosen."""
    return replace(Invocation("ADD", "c", "/n", "net1", "", "/a", {"cniVersion": "1.0.0", "name": "n"}), **changes)


BUILTINS = ("both", "builtin", "ipam", "bridge", "flannel", "macvlan", "ptp")


def plugins_of(process, builtin, mode, **options):
    return Plugins(process.as_programs, mode, modules=builtin.as_modules(*BUILTINS), **options)


def run(plugins, plugin_type, call):
    """Run the call by whoever is recorded."""
    return calls.run(plugins.recorded(plugin_type, call), call)


def choose(plugins, plugin_type, call):
    """Choose an implementation like planning does."""
    return plugins.servers(plugin_type, call, plugins.programs([(plugin_type, call)]))


def made_by(name):
    """Return the output of an ADD; its interface names the implementation."""
    return b'{"cniVersion":"1.0.0","interfaces":[{"name":"%s"}]}' % name.encode()


def result_of(name):
    return Result((Interface(name),))


@pytest.fixture
def process():
    answers = {("both", "ADD"): made_by("process"), ("binary", "ADD"): made_by("process")}
    return FakePluginRunner(answers, missing={"builtin", "none"}, where="/a/{}")


@pytest.fixture
def builtin():
    answers = {("both", "ADD"): made_by("built-in"), ("builtin", "ADD"): made_by("built-in")}
    return FakePluginRunner(answers, missing={"binary", "none"}, where=BUILT_IN)


@pytest.mark.parametrize(
    ("mode", "name", "expected"),
    [
        ("off", "both", "process"),
        ("off", "binary", "process"),
        ("off", "builtin", None),
        ("fallback", "both", "process"),
        ("fallback", "binary", "process"),
        ("fallback", "builtin", "built-in"),
        ("fallback", "none", None),
        ("prefer", "both", "built-in"),
        ("prefer", "binary", "process"),
        ("prefer", "builtin", "built-in"),
        ("prefer", "none", None),
    ],
)
def test_choice(process, builtin, mode, name, expected):
    plugins = plugins_of(process, builtin, mode)
    if expected is None:
        for work in (run, choose):
            with pytest.raises(InvalidNetworkConfigError, match=f'^failed to find plugin "{name}" in path'):
                work(plugins, name, invocation())
        return
    assert run(plugins, name, invocation()) == result_of(expected)
    assert choose(plugins, name, invocation()) == {name: f"/a/{name}" if expected == "process" else BUILT_IN}


@pytest.mark.parametrize("mode", ["off", "fallback", "prefer"])
def test_what_the_builtin_does_not_know_is_left_to_the_binary(process, builtin, mode):
    builtin.not_supported = {"both": "newKey: 5"}
    assert run(plugins_of(process, builtin, mode), "both", invocation()) == result_of("process")
    assert len(process.calls) + len(builtin.calls) == 1


@pytest.mark.parametrize("mode", ["prefer", "fallback"])
def test_what_no_binary_may_know_is_refused_and_a_del_done(process, builtin, mode):
    builtin.not_supported = {"builtin": "newKey: 5"}
    plugins = plugins_of(process, builtin, mode)
    with pytest.raises(UnsupportedFieldError, match="^newKey: 5 is not supported by the built-in builtin"):
        run(plugins, "builtin", invocation())
    run(plugins, "builtin", invocation(verb="DEL"))
    assert builtin.order == [("builtin", "DEL")]


def test_a_failing_binary_is_not_replaced(process, builtin):
    """Only a missing one is: a plugin that has begun its work must not be followed by another."""
    process.answers["both", "ADD"] = InvalidNetworkConfigError("bad subnet")
    with pytest.raises(InvalidNetworkConfigError, match="bad subnet"):
        run(plugins_of(process, builtin, "fallback"), "both", invocation())
    assert builtin.calls == []


MASQ = {"ipMasq": True}
HAS = "10.1.0.2/24", "fd00::2/64", "fe80::1/64"
"""Addresses of the link `lo`, the only one that there is."""


@pytest.mark.parametrize(
    ("mode", "name", "keys", "verb", "netns", "ifname", "recorded", "follows"),
    [
        ("fallback", "ptp", MASQ, "DEL", "", "lo", None, True),
        ("fallback", "bridge", MASQ, "DEL", "/run/netns/of-nobody", "lo", None, True),
        ("fallback", "bridge", {"macspoofchk": True}, "DEL", "", "lo", None, True),
        ("fallback", "bridge", MASQ, "DEL", OWN_NETNS, "lo", None, False),
        ("fallback", "bridge", MASQ, "DEL", OWN_NETNS, "lo", ["10.1.0.2/24"], False),
        # The address is a guest's by now, or has been taken away.
        ("fallback", "bridge", MASQ, "DEL", OWN_NETNS, "lo", ["10.1.0.2/24", "10.1.0.3/24"], True),
        # Its first DEL was killed when the interface was gone and the rules were not.
        ("fallback", "bridge", MASQ, "DEL", OWN_NETNS, "gone0", None, True),
        ("fallback", "bridge", MASQ, "DEL", OWN_NETNS, "gone0", ["10.1.0.2/24"], True),
        ("fallback", "macvlan", MASQ, "DEL", "", "lo", None, False),
        ("fallback", "ptp", {}, "DEL", "", "lo", None, False),
        ("fallback", "ptp", {"ipMasq": "yes"}, "DEL", "", "lo", None, False),
        ("fallback", "ptp", MASQ, "CHECK", "", "lo", None, False),
        ("off", "ptp", MASQ, "DEL", "", "lo", None, False),
        ("fallback", "flannel", {}, "DEL", "", "lo", None, True),
        ("fallback", "flannel", {"delegate": {"type": "ptp"}}, "DEL", "", "lo", None, True),
        ("fallback", "flannel", {"delegate": {"type": "macvlan"}}, "DEL", "", "lo", None, False),
        ("fallback", "flannel", {"delegate": {"ipMasq": False}}, "DEL", "", "lo", None, False),
        ("fallback", "flannel", {"delegate": 5}, "DEL", "", "lo", None, False),
    ],
)
def test_rules_that_a_reference_plugin_leaves_are_removed(
    process, builtin, monkeypatch, mode, name, keys, verb, netns, ifname, recorded, follows
):
    def addresses(self, ifname):
        if self.path != OWN_NETNS:
            raise OSError("no namespace")
        return [ipaddress.ip_interface(text) for text in HAS] if ifname == "lo" else None

    removed = []
    monkeypatch.setattr(Builtin, "remove_rules", lambda self, call, netns: removed.append((call, netns)))
    monkeypatch.setattr(PodNetns, "addresses", addresses)
    result = None if recorded is None else Result(ips=tuple(map(IpConfig, recorded)))
    fields = {"cniVersion": "0.3.1", "name": "n", **keys}
    call = invocation(verb=verb, netns=netns, ifname=ifname, fields=fields, recorded=result)
    assert run(plugins_of(process, builtin, mode), name, call) == Result()
    assert process.order == [(name, verb)]
    assert builtin.order == []
    assert [given.path for _, given in removed] == ([netns] if follows else [])
    for given, _ in removed:
        assert (given.container_id, given.ifname, given.recorded) == ("c", ifname, result)
        assert given.fields["name"] == "n"
        assert given.fields.get("ipMasq") or given.fields["macspoofchk"]


def test_rules_that_stay_fail_the_del(process, builtin, monkeypatch):
    def fail(*_):
        raise TryAgainLaterError("the lock of iptables is held")

    monkeypatch.setattr(Builtin, "remove_rules", fail)
    call = invocation(verb="DEL", netns="", fields={"cniVersion": "1.0.0", "name": "n", **MASQ})
    message = r"^the lock of iptables is held \(rules that the binary of ptp has left\)"
    with pytest.raises(TryAgainLaterError, match=message):
        run(plugins_of(process, builtin, "fallback"), "ptp", call)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "success"),
        (TryAgainLaterError("x"), "error"),
        (InvalidNetworkConfigError("x"), "refused"),
        (Interrupted(), "timeout"),
        (RuntimeError("x"), "error"),
    ],
)
def test_observed(process, builtin, error, outcome):
    heard = []
    if error:
        process.answers["both", "ADD"] = error
    plugins = plugins_of(process, builtin, "off", observe=lambda *args: heard.append(args))
    with pytest.raises(type(error)) if error else contextlib.nullcontext():
        run(plugins, "both", invocation())
    [(plugin_type, verb, seen, seconds)] = heard
    assert (plugin_type, verb, seen) == ("both", "ADD", outcome)
    assert 0 <= seconds < 60


# --- chosen before anything runs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "name", "expected"),
    [
        ("off", "both", {"both": "/a/both"}),
        ("fallback", "both", {"both": "/a/both"}),
        ("fallback", "builtin", {"builtin": "built-in"}),
        ("prefer", "both", {"both": "built-in"}),
        ("prefer", "binary", {"binary": "/a/binary"}),
    ],
)
def test_the_one_that_was_chosen_does_the_add_also_where_it_fails(process, builtin, mode, name, expected):
    plugins = plugins_of(process, builtin, mode)
    chosen = choose(plugins, name, invocation())
    assert chosen == expected
    assert process.calls == builtin.calls == []
    process.answers[name, "ADD"] = builtin.answers[name, "ADD"] = CniError("no", code=111)
    with pytest.raises(CniError):
        run(plugins, name, invocation(served_by=chosen))
    assert builtin.order == ([(name, "ADD")] if chosen[name] == BUILT_IN else [])
    assert process.order == ([] if chosen[name] == BUILT_IN else [(name, "ADD")])


def test_the_choice_holds_whatever_has_been_installed_or_set_since(process, builtin):
    by_binary = invocation(served_by={"both": "/elsewhere/both"})
    assert run(plugins_of(process, builtin, "prefer"), "both", by_binary) == result_of("process")
    assert process.paths == ["/elsewhere/both"]
    by_builtin = invocation(served_by={"both": BUILT_IN})
    assert run(plugins_of(process, builtin, "fallback"), "both", by_builtin) == result_of("built-in")


def test_a_binary_that_goes_after_it_was_chosen_fails_the_add(process, builtin):
    """Another one would be on record as the one that did it."""
    plugins = plugins_of(process, builtin, "fallback")
    chosen = choose(plugins, "both", invocation())
    process.missing.add("both")
    with pytest.raises(PluginNotFoundError):
        run(plugins, "both", invocation(served_by=chosen))
    assert builtin.calls == []


def test_what_a_builtin_calls_is_chosen_with_it(process, builtin, monkeypatch):
    """The choice uses the final configuration, as the built-in may not know a requested key."""
    named = {"cniVersion": "1.0.0", "name": "n"}
    asking = {**named, "asks": "for something"}
    builtin.called = {"both": {"ipam": asking, "binary": named}, "ipam": {"builtin": named}}
    seen = []

    def unsupported(self, call):
        seen.append((self.plugin_type, call.fields))
        return ""

    monkeypatch.setattr(FakeModule, "unsupported", unsupported)
    assert choose(plugins_of(process, builtin, "prefer"), "both", invocation()) == {
        "both": BUILT_IN,
        "ipam": BUILT_IN,
        "binary": "/a/binary",
        "builtin": BUILT_IN,
    }
    assert ("ipam", asking) in seen


def test_plugins_that_call_each_other_are_chosen_once(process, builtin):
    builtin.called = {"both": {"both": {}}}
    assert choose(plugins_of(process, builtin, "prefer"), "both", invocation()) == {"both": BUILT_IN}


@pytest.mark.parametrize("mode", ["prefer", "fallback"])
def test_a_configuration_that_the_builtin_refuses_is_refused_when_it_is_chosen(process, builtin, mode):
    process.missing.add("both")
    builtin.refused["both"] = InvalidNetworkConfigError("no such range")
    with pytest.raises(InvalidNetworkConfigError, match="no such range"):
        choose(plugins_of(process, builtin, mode), "both", invocation())


def test_what_cannot_read_its_configuration_keeps_nothing(process, builtin):
    plugin = plugins_of(process, builtin, "prefer").of("both", invocation())
    builtin.holds["both"] = InvalidNetworkConfigError("dataDir: it has a NUL byte")
    assert not plugin.keeps(invocation())
    # What cannot be seen is not known.
    builtin.holds["both"] = IoFailureError("Input/output error")
    with pytest.raises(IoFailureError):
        plugin.keeps(invocation())


def test_what_a_binary_calls_is_its_own_choice(process, builtin):
    builtin.called = {"both": {"ipam": {}}}
    assert choose(plugins_of(process, builtin, "fallback"), "both", invocation()) == {"both": "/a/both"}


def test_a_binary_needs_the_binary_of_a_built_in_that_has_no_program(process, builtin):
    """`host-local` may be a link to `multus-builtin`; the leases of `dhcp` are the daemon's."""
    process.missing |= {"dhcp", "host-local"}
    plugins = plugins_of(process, builtin, "prefer", excepted={"ipvlan"})
    asked = invocation(fields={"cniVersion": "1.0.0", "name": "n", "ipam": {"type": "host-local"}})
    assert choose(plugins, "ipvlan", asked) == {"ipvlan": "/a/ipvlan"}
    asked = invocation(fields={"cniVersion": "1.0.0", "name": "n", "ipam": {"type": "dhcp"}})
    with pytest.raises(InvalidNetworkConfigError, match='^failed to find plugin "dhcp"'):
        choose(plugins, "ipvlan", asked)


# --- CHECK and DEL by the one that did the ADD ------------------------------------------------------------------------


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
        # The implementation that ran ADD is unknown: choose as for an ADD.
        ("prefer", "both", "", "builtin", False),
        ("fallback", "both", "", "process", False),
    ],
)
def test_who_did_the_add_does_the_rest(process, builtin, caplog, verb, mode, name, added_by, ran, replaced):
    call = invocation(verb=verb, served_by={name: added_by} if added_by else {})
    run(plugins_of(process, builtin, mode), name, call)
    # A binary that is not there has been asked for.
    asked = {"process": [(name, verb)], "builtin": []} if ran == "process" else {"builtin": [(name, verb)]}
    assert builtin.order == asked["builtin"]
    if "process" in asked:
        assert process.order == asked["process"]
    assert ("is missing" in caplog.text) == replaced


def test_a_new_choice_does_not_go_by_the_last_one(process, builtin):
    call = invocation(served_by={"both": "/a/both"})
    assert choose(plugins_of(process, builtin, "prefer"), "both", call) == {"both": BUILT_IN}


def test_what_the_recorded_builtin_does_not_know_is_left_to_the_binary(process, builtin):
    builtin.not_supported = {"both": "newKey: 5"}
    call = invocation(verb="DEL", served_by={"both": "built-in"})
    run(plugins_of(process, builtin, "prefer"), "both", call)
    assert (process.order, builtin.order) == ([("both", "DEL")], [])


# --- types that the binary serves whatever the mode is ----------------------------------------------------------------


@pytest.mark.parametrize("verb", ["ADD", "STATUS", "GC", "CHECK", "DEL"])
@pytest.mark.parametrize("mode", ["prefer", "fallback", "off"])
def test_an_excepted_type_is_its_binarys(process, builtin, mode, verb):
    plugins = plugins_of(process, builtin, mode, excepted=["both"])
    run(plugins, "both", invocation(verb=verb))
    assert (process.order, builtin.order) == ([("both", verb)], [])
    assert plugins.of("both", invocation()).place == "/a/both"


@pytest.mark.parametrize("mode", ["prefer", "fallback"])
def test_an_excepted_type_without_its_binary_is_not_to_be_had(process, builtin, mode):
    plugins = plugins_of(process, builtin, mode, excepted=["builtin"])
    assert plugins.of("builtin", invocation()).place == ""
    for call in (invocation(), invocation(verb="DEL", served_by={"builtin": "/a/builtin"})):
        with pytest.raises(PluginNotFoundError):
            run(plugins, "builtin", call)
    assert builtin.calls == []


@pytest.mark.parametrize("verb", ["CHECK", "DEL"])
def test_what_a_builtin_made_before_the_exception_is_its_own(process, builtin, verb):
    plugins = plugins_of(process, builtin, "prefer", excepted=["both"])
    run(plugins, "both", invocation(verb=verb, served_by={"both": "built-in"}))
    assert (process.order, builtin.order) == ([], [("both", verb)])


def test_what_the_binary_of_an_excepted_type_leaves_is_its_own(process, builtin):
    process.missing.discard("bridge")
    run(plugins_of(process, builtin, "prefer", excepted=["bridge"]), "bridge", invocation(verb="DEL", netns=""))
    assert builtin.calls == []


def test_other_types_go_by_the_mode(process, builtin):
    assert run(plugins_of(process, builtin, "prefer", excepted=["bridge"]), "both", invocation()) == result_of(
        "built-in"
    )


@pytest.mark.parametrize(
    ("mode", "excepted", "expected"),
    [
        ("prefer", [], ["networks that they have attached: /a/bridge, /a/macvlan"]),
        ("prefer", ["bridge", "none"], ["networks that they have attached: /a/macvlan", "can't be attached: none"]),
        ("fallback", [], []),
        ("off", ["none"], ["no binary in /bin, networks of these types can't be attached: none"]),
    ],
)
def test_which_binaries_run_is_logged(process, builtin, caplog, mode, excepted, expected):
    caplog.set_level("INFO")
    process.missing |= PLUGINS.keys() - {"bridge", "macvlan"}
    plugins_of(process, builtin, mode, excepted=excepted).log_binaries("/bin")
    assert all(line.endswith(end) for line, end in zip(caplog.messages, expected, strict=True))


# --- a binary that is newer than the built-in ------------------------------------------------------------------------


def of_reference(version):
    return Build("github.com/containernetworking/plugins/plugins/main/bridge", version)


NEWER = of_reference("v99.0.0")


@pytest.fixture
def beside(process, builtin):
    """Return the plugins of a node whose binaries of these types are of these builds."""

    def made(mode="prefer", builds=None, **options):
        process.builds = {"bridge": NEWER} if builds is None else builds
        process.answers["bridge", "ADD"] = made_by("process")
        builtin.answers["bridge", "ADD"] = made_by("built-in")
        return plugins_of(process, builtin, mode, **options)

    return made


def test_so_does_one_program_for_all_plugins(beside):
    build = Build("github.com/containernetworking/plugins", "v99.0.0-k3s1")
    assert choose(beside(builds={"bridge": build}), "bridge", invocation()) == {"bridge": "/a/bridge"}


def test_a_newer_binary_serves_new_pods(beside, caplog):
    plugins = beside()
    assert choose(plugins, "bridge", invocation()) == {"bridge": "/a/bridge"}
    assert run(plugins, "bridge", invocation()) == result_of("process")
    assert choose(plugins, "ptp", invocation()) == {"ptp": BUILT_IN}
    (line,) = caplog.messages
    assert "bridge" in line
    assert f"v99.0.0 is newer than {MODELS['bridge'][1]}" in line


@pytest.mark.parametrize(
    "build",
    [
        Build(),
        of_reference(""),
        of_reference("v1.9.1"),
        of_reference(MODELS["bridge"][1]),
        of_reference(f"{MODELS['bridge'][1]}-rc1"),
        Build("example.com/our/bridge", "v99.0.0"),
        Build("github.com/containernetworking/plugins-of-ours", "v99.0.0"),
    ],
)
def test_another_binary_does_not(beside, build):
    assert choose(beside(builds={"bridge": build}), "bridge", invocation()) == {"bridge": BUILT_IN}


@pytest.mark.parametrize("mode", ["off", "fallback"])
def test_other_modes_are_as_they_were(beside, mode):
    assert choose(beside(mode), "bridge", invocation()) == {"bridge": "/a/bridge"}


def test_del_and_check_run_what_add_ran(beside, process, builtin):
    plugins = beside()
    choose(plugins, "bridge", invocation())
    for server, runs in ((BUILT_IN, builtin), ("/a/bridge", process)):
        for verb in ("CHECK", "DEL"):
            run(plugins, "bridge", invocation(verb=verb, served_by={"bridge": server}))
        assert runs.order[-2:] == [("bridge", "CHECK"), ("bridge", "DEL")]


def test_a_binary_that_is_installed_or_replaced_counts_soon(beside, process, monkeypatch):
    monkeypatch.setattr(select, "LOOK_SECONDS", 0.0)
    plugins = beside(builds={})
    for builds, server in (
        ({}, BUILT_IN),
        ({"bridge": NEWER}, "/a/bridge"),
        ({"bridge": of_reference("v1.0.0")}, BUILT_IN),
    ):
        process.builds = builds
        assert choose(plugins, "bridge", invocation()) == {"bridge": server}


def test_a_disk_that_hangs_holds_up_no_built_in(beside, monkeypatch):
    hangs = threading.Event()
    monkeypatch.setattr(FakePrograms, "builds", lambda *_: hangs.wait(20))
    plugins = beside()
    began = time.monotonic()
    try:
        for _ in range(20):
            assert choose(plugins, "bridge", invocation()) == {"bridge": BUILT_IN}
        assert time.monotonic() - began < 5
    finally:
        hangs.set()


# --- Multus as a plugin ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["off", "fallback", "prefer"])
@pytest.mark.parametrize("plugin_type", ["multus-shim", "multus", "multus-cni"])
def test_multus_is_refused_by_its_name(process, builtin, mode, plugin_type):
    plugins = plugins_of(process, builtin, mode)
    with pytest.raises(PluginIsMultusError, match=f'^plugin "{plugin_type}" is Multus itself') as caught:
        choose(plugins, plugin_type, invocation())
    assert caught.value.code == 7
    assert choose(plugins, "multus-builtin", invocation())


@pytest.mark.parametrize("ipam_type", ["multus-shim", "disguised"])
def test_multus_is_refused_as_the_ipam_plugin_of_a_binary(process, builtin, ipam_type):
    process.programs_of_multus.add("/a/disguised")
    process.missing.discard("disguised")
    plugins = plugins_of(process, builtin, "off")
    fields = {**invocation().fields, "ipam": {"type": ipam_type}}
    with pytest.raises(PluginIsMultusError, match=f'^plugin "{ipam_type}"'):
        choose(plugins, "binary", replace(invocation(), fields=fields))


def test_a_file_of_multus_is_refused(process, builtin):
    process.programs_of_multus.add("/a/binary")
    plugins = plugins_of(process, builtin, "prefer")
    with pytest.raises(PluginIsMultusError, match='^plugin "binary"'):
        choose(plugins, "binary", invocation())
    # A DEL of an attachment of an older daemon is refused too, so it is the last one (`Plugin.may_have_left`).
