"""ListRunner by the rules of libcni: order, prevResult, runtimeConfig, versions, cache, errors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.plugins.find import PluginNotFoundError
from multus_daemon.plugins.plugin import NothingLeftError, Progress
from multus_daemon.plugins.run import ListRunner
from multus_daemon.runtime.deadline import Interrupted
from multus_daemon.spec.attachment import Attachment, Sandbox
from multus_daemon.spec.cni import conf, errors
from multus_daemon.spec.cni.errors import (
    CniError,
    DecodingFailureError,
    IncompatibleVersionError,
    InvalidEnvironmentError,
    InvalidNetworkConfigError,
    IoFailureError,
    TryAgainLaterError,
    UnknownContainerError,
)
from multus_daemon.spec.cni.names import ContainerId, IfName
from multus_daemon.spec.cni.result import Interface, IpConfig, Result
from tests.fakes.runner import FakePluginRunner
from tests.planning import plan_one

SANDBOX = Sandbox(ContainerId("c0ffee"), "/run/netns/a")
NETNS = PodNetns(SANDBOX.netns)
BRIDGE_RESULT = b'{"cniVersion":"1.0.0","interfaces":[{"name":"net1","mtu":1450}],"ips":[{"address":"10.1.0.2/24"}]}'
RESULT = Result((Interface("net1", mtu=1450),), (IpConfig("10.1.0.2/24"),))


def attachment(version="1.0.0", plugins=("bridge", "portmap", "tuning"), **extra):
    header = {"cniVersion": version, "name": "n1", **extra}
    entries = [entry if isinstance(entry, dict) else {"type": entry} for entry in plugins]
    raw = json.dumps({**header, "plugins": entries} if len(entries) > 1 else {**header, **entries[0]})
    return Attachment(
        "web/n1", conf.parse(raw.encode()), IfName("net1"), cni_args=(("IgnoreUnknown", "true"), ("K", "V"))
    )


@pytest.fixture
def cache(tmp_path):
    return ResultCache(tmp_path)


@pytest.fixture
def runner():
    return FakePluginRunner({("bridge", "ADD"): BRIDGE_RESULT, ("portmap", "ADD"): lambda call: _echo(call.stdin)})


@pytest.fixture
def chain(runner, cache):
    return ListRunner(runner.as_plugins, cache, "/a:/b")


def add_and_remember(chain, whole, sandbox=SANDBOX):
    """Attach and remember like the engine; return the result."""
    result = chain.add(sandbox, whole, PodNetns(sandbox.netns))
    chain.remember(sandbox, whole.with_result(result))
    return result


def _echo(stdin):
    """Return the previous result, like chained plugins."""
    return json.dumps(json.loads(stdin)["prevResult"]).encode()


class TestAdd:
    def test_in_order_each_with_the_result_before(self, chain, runner):
        runner.answers["tuning", "ADD"] = b'{"cniVersion":"0.4.0","ips":[{"version":"4","address":"10.9.0.2/24"}]}'
        result = chain.add(SANDBOX, attachment(), NETNS)
        assert runner.order == [("bridge", "ADD"), ("portmap", "ADD"), ("tuning", "ADD")]
        previous = [call.config.get("prevResult") for call in runner.calls]
        assert previous == [None, json.loads(BRIDGE_RESULT), json.loads(BRIDGE_RESULT)]
        assert result == Result(ips=(IpConfig("10.9.0.2/24"),))

    @pytest.mark.conformance("config-16")
    def test_invocation(self, chain, runner):
        chain.add(SANDBOX, attachment(), NETNS)
        call = runner.calls[1].invocation
        assert (call.verb, call.container_id, call.netns, call.ifname) == ("ADD", "c0ffee", "/run/netns/a", "net1")
        assert (call.args, call.path) == ("IgnoreUnknown=true;K=V", "/a:/b")
        assert runner.calls[1].config | {"prevResult": 0} == {
            "cniVersion": "1.0.0",
            "name": "n1",
            "type": "portmap",
            "prevResult": 0,
        }

    @pytest.mark.parametrize("may_be_own", [False, True])
    @pytest.mark.parametrize("verb", ["add", "delete", "check"])
    def test_every_plugin_gets_the_namespace_of_the_request(self, chain, runner, verb, may_be_own):
        netns = PodNetns(SANDBOX.netns, may_be_own=may_be_own)
        getattr(chain, verb)(SANDBOX, attachment().with_result(RESULT), netns)
        assert runner.namespaces == [netns] * 3
        assert [call.invocation.netns_override for call in runner.calls] == [may_be_own] * 3

    @pytest.mark.weak_spot(13)
    def test_list_without_a_version_keeps_its_result(self, chain, runner, cache):
        runner.answers["bridge", "ADD"] = b'{"ip4":{"ip":"10.1.0.2/24"}}'
        raw = b'{"name":"n1","plugins":[{"type":"bridge"},{"type":"portmap"}]}'
        whole = Attachment("web/n1", conf.parse(raw), IfName("net1"))
        assert add_and_remember(chain, whole).ips == RESULT.ips
        assert runner.calls[1].config["cniVersion"] == "0.1.0"
        assert runner.calls[1].config["prevResult"]["ip4"]["ip"] == "10.1.0.2/24"
        assert cache.entries("c0ffee")[0].result["ip4"]["ip"] == "10.1.0.2/24"

    def test_result_that_an_old_version_can_not_express(self, chain, runner, cache):
        """Without addresses there is no 0.2.0 result; the network works all the same."""
        runner.answers["bridge", "ADD"] = b'{"cniVersion":"1.0.0","interfaces":[{"name":"net1"}]}'
        runner.answers["portmap", "ADD"] = b'{"cniVersion":"1.0.0","interfaces":[{"name":"net1"}]}'
        result = add_and_remember(chain, attachment("0.2.0", ["bridge", "portmap"]))
        assert result == Result((Interface("net1"),))
        assert "prevResult" not in runner.calls[1].config
        assert cache.read_result("n1", "c0ffee", "net1", "0.2.0") == result

    def test_the_first_failure_ends_it(self, chain, runner, cache):
        runner.answers["portmap", "ADD"] = TryAgainLaterError("table is locked", "by iptables")
        with pytest.raises(TryAgainLaterError) as caught:
            chain.add(SANDBOX, attachment(), NETNS)
        assert caught.value.msg == 'table is locked (plugin type="portmap" network="web/n1" interface="net1", ADD)'
        assert (caught.value.code, caught.value.details) == (11, "by iptables")
        assert runner.order == [("bridge", "ADD"), ("portmap", "ADD")]
        assert cache.entries("c0ffee") == []

    @pytest.mark.parametrize("stdout", [b"", b"garbage", b"[]", b'{"ips":3}'])
    def test_stdout_that_is_no_result(self, chain, runner, stdout):
        runner.answers["bridge", "ADD"] = stdout
        with pytest.raises(DecodingFailureError, match=r'plugin type="bridge" network="web/n1" interface="net1", ADD'):
            chain.add(SANDBOX, attachment(), NETNS)

    def test_remembered(self, chain, cache):
        whole = attachment(plugins=["bridge", "portmap"])
        assert cache.entries("c0ffee") == []
        add_and_remember(chain, whole)
        [entry] = cache.entries("c0ffee")
        assert entry.config == whole.config.raw
        assert (entry.network, entry.ifname, entry.netns) == ("n1", "net1", "/run/netns/a")
        assert entry.cni_args == whole.cni_args
        assert entry.result == json.loads(BRIDGE_RESULT)

    def test_a_cache_that_can_not_be_written(self, chain, tmp_path):
        (tmp_path / "results").write_text("in the way")
        with pytest.raises(IoFailureError, match=r"^the result of the ADD could not be written: "):
            add_and_remember(chain, attachment())


class TestDelete:
    @pytest.mark.conformance("verbs-16")
    def test_in_reverse_each_with_the_stored_result(self, chain, runner, cache):
        whole = attachment(plugins=["bridge", "portmap"])
        add_and_remember(chain, whole)
        runner.calls.clear()
        chain.delete(SANDBOX, whole, NETNS)
        assert runner.order == [("portmap", "DEL"), ("bridge", "DEL")]
        assert [call.config["prevResult"] for call in runner.calls] == [json.loads(BRIDGE_RESULT)] * 2
        assert cache.entries("c0ffee") == []

    @pytest.mark.parametrize(("version", "sent"), [("0.3.1", False), ("0.4.0", True), ("1.1.0", True)])
    def test_prev_result_from_040_on(self, chain, runner, version, sent):
        chain.delete(SANDBOX, attachment(version).with_result(RESULT), NETNS)
        assert [("prevResult" in call.config) for call in runner.calls] == [sent] * 3
        # Plugins in this process are told whatever the version is.
        assert [call.invocation.recorded for call in runner.calls] == [RESULT] * 3

    def test_nothing_stored(self, chain, runner):
        chain.delete(Sandbox(ContainerId("c0ffee"), ""), attachment(), PodNetns(""))
        assert len(runner.calls) == 3
        assert "prevResult" not in runner.calls[0].config
        assert runner.calls[0].invocation.netns == ""

    def test_goes_on_past_failures_and_keeps_the_cache(self, chain, runner, cache):
        whole = attachment(plugins=["bridge", "portmap"])
        add_and_remember(chain, whole)
        runner.calls.clear()
        runner.answers["portmap", "DEL"] = TryAgainLaterError("locked", "A")
        runner.answers["bridge", "DEL"] = IoFailureError("broken", "B")
        runner.holds |= {"bridge": True, "portmap": True}
        with pytest.raises(TryAgainLaterError) as caught:
            chain.delete(SANDBOX, whole, NETNS)
        assert runner.order == [("portmap", "DEL"), ("bridge", "DEL")]
        assert caught.value.code == 11
        assert caught.value.msg == (
            'locked (plugin type="portmap" network="web/n1" interface="net1", DEL); '
            'broken (plugin type="bridge" network="web/n1" interface="net1", DEL)'
        )
        assert caught.value.details == "A; B"
        assert len(cache.entries("c0ffee")) == 1
        # The next try succeeds.
        runner.answers.clear()
        chain.delete(SANDBOX, whole, NETNS)
        assert cache.entries("c0ffee") == []

    def test_unknown_container_is_done(self, chain, runner):
        runner.answers["tuning", "DEL"] = UnknownContainerError("no such container")
        chain.delete(SANDBOX, attachment(), NETNS)
        assert len(runner.calls) == 3

    def test_an_interruption_stops(self, chain, runner):
        runner.answers["tuning", "DEL"] = Interrupted()
        with pytest.raises(Interrupted):
            chain.delete(SANDBOX, attachment(), NETNS)
        assert len(runner.calls) == 1

    def test_unreadable_cache_is_no_obstacle(self, chain, runner, tmp_path):
        (tmp_path / "results").mkdir()
        (tmp_path / "results" / "n1-c0ffee-net1").write_text("{")
        chain.delete(SANDBOX, attachment(), NETNS)
        assert len(runner.calls) == 3
        assert not (tmp_path / "results" / "n1-c0ffee-net1").exists()


class Existing(PodNetns):
    """A namespace that is there, with these links; None: it cannot be entered."""

    exists = True
    links: list[str] | None

    def existing(self, ifnames):
        if self.links is None:
            raise PermissionError("not now")
        return [name for name in ifnames if name in self.links]


def in_netns(*links):
    """The namespace of SANDBOX, which exists."""
    netns = Existing(SANDBOX.netns)
    netns.links = list(links)
    return netns


class TestNothingLeft:
    """A DEL that failed, after which nothing is left that a later one could free; `test_plugin` has the rule."""

    def failing(self, chain, runner, plugin, added, deleted):
        """The error of a DEL after an ADD that has failed, by `plugin`."""
        one, progress = plan_one(chain, SANDBOX, attachment()), Progress()
        runner.answers |= {(plugin, "ADD"): added, (plugin, "DEL"): deleted}
        with pytest.raises(CniError):
            chain.add(SANDBOX, one, NETNS, progress)
        with pytest.raises(CniError) as caught:
            chain.delete(SANDBOX, one, NETNS, progress)
        return caught.value

    def test_it_failed_as_its_add_did(self, chain, runner):
        runner.holds["portmap"] = True
        error = self.failing(chain, runner, "portmap", CniError("MasqMarkBit"), CniError("MasqMarkBit"))
        assert isinstance(error, NothingLeftError)
        assert error.code == 999
        assert error.msg.startswith("MasqMarkBit (plugin type=")

    def test_another_failure_may_pass(self, chain, runner):
        runner.holds["portmap"] = True
        error = self.failing(chain, runner, "portmap", CniError("bit"), CniError("iptables is locked"))
        assert not isinstance(error, NothingLeftError)

    def test_those_behind_have_never_run(self, chain, runner):
        runner.holds |= {"tuning": True, "portmap": True}
        runner.answers["tuning", "DEL"] = CniError("no such file")
        error = self.failing(chain, runner, "portmap", CniError("bit"), CniError("bit"))
        assert isinstance(error, NothingLeftError)

    def test_one_before_it_that_fails_may_have_left_something(self, chain, runner):
        runner.holds["bridge"] = True
        runner.answers["bridge", "DEL"] = CniError("busy")
        error = self.failing(chain, runner, "portmap", CniError("bit"), CniError("bit"))
        assert not isinstance(error, NothingLeftError)

    @pytest.mark.parametrize("refused", [False, True])
    def test_of_a_later_del_the_code_tells(self, chain, runner, refused):
        """After a crash the outcome of the ADD is unknown."""
        runner.holds["bridge"] = True
        runner.answers["bridge", "DEL"] = InvalidNetworkConfigError("no range") if refused else CniError("no range")
        with pytest.raises(CniError) as caught:
            chain.delete(SANDBOX, attachment(), NETNS)
        assert isinstance(caught.value, NothingLeftError) is refused
        # An ADD that has succeeded was not refused.
        with pytest.raises(CniError) as caught:
            chain.delete(SANDBOX, attachment().with_result(RESULT), NETNS)
        assert not isinstance(caught.value, NothingLeftError)

    def test_what_cannot_be_seen_stays_and_stops_no_other_plugin(self, chain, runner):
        runner.answers["portmap", "DEL"] = CniError("bit")
        runner.holds["portmap"] = IoFailureError("Input/output error")
        with pytest.raises(CniError, match=r"^bit \(plugin type=") as caught:
            chain.delete(SANDBOX, attachment(), NETNS)
        assert not isinstance(caught.value, NothingLeftError)
        assert runner.order == [("tuning", "DEL"), ("portmap", "DEL"), ("bridge", "DEL")]

    @pytest.mark.parametrize("links", [["net1"], None])
    def test_an_interface_stays(self, chain, runner, links):
        runner.answers["bridge", "DEL"] = InvalidNetworkConfigError("no range")
        netns = in_netns()
        netns.links = links
        with pytest.raises(CniError) as caught:
            chain.delete(SANDBOX, attachment(), netns)
        assert not isinstance(caught.value, NothingLeftError)
        netns.links = []
        with pytest.raises(NothingLeftError):
            chain.delete(SANDBOX, attachment(), netns)

    def test_the_interface_of_an_auxiliary_chain_is_not_its_own(self, chain, runner):
        runner.answers["bridge", "DEL"] = InvalidNetworkConfigError("no range")
        with pytest.raises(NothingLeftError):
            chain.delete(SANDBOX, replace(attachment(), auxiliary=True), in_netns("net1"))


class TestIpam:
    """The address is released although the plugin of the interface has not done it."""

    @pytest.fixture
    def one(self, runner):
        runner.holds["whereabouts"] = True
        return attachment(plugins=({"type": "host-device", "ipam": {"type": "whereabouts"}},)).with_result(RESULT)

    def test_after_a_failure_without_the_interface(self, chain, runner, one):
        runner.answers["host-device", "DEL"] = CniError("Link not found")
        with pytest.raises(NothingLeftError, match="^Link not found"):
            chain.delete(SANDBOX, one, in_netns())
        assert runner.order == [("host-device", "DEL"), ("whereabouts", "DEL")]

    def test_without_the_namespace_also_after_a_success(self, chain, runner, one):
        chain.delete(SANDBOX, one, NETNS)
        assert runner.order == [("host-device", "DEL"), ("whereabouts", "DEL")]

    def test_not_if_it_keeps_none(self, chain, runner, one):
        runner.holds["whereabouts"] = False
        chain.delete(SANDBOX, one, NETNS)
        assert runner.order == [("host-device", "DEL")]

    def test_without_its_program_a_success_counts(self, chain, runner, one):
        """The type may be a word of the plugin's own."""
        runner.answers["whereabouts", "DEL"] = PluginNotFoundError("whereabouts", ["/a"])
        chain.delete(SANDBOX, one, NETNS)
        runner.answers["host-device", "DEL"] = CniError("Link not found")
        with pytest.raises(CniError) as caught:
            chain.delete(SANDBOX, one, NETNS)
        assert not isinstance(caught.value, NothingLeftError)

    def test_not_while_a_pod_may_use_it(self, chain, runner, one):
        runner.answers["host-device", "DEL"] = CniError("busy")
        with pytest.raises(CniError, match="^busy") as caught:
            chain.delete(SANDBOX, one, in_netns("net1"))
        assert not isinstance(caught.value, NothingLeftError)
        assert ("whereabouts", "DEL") not in runner.order

    def test_a_failure_of_it_leaves_no_interface_in_the_pod(self, chain, runner, one):
        """host-device asks it first, and moves nothing if it fails."""
        netns = in_netns("net1")

        def delete(call):
            if "ipam" in call.fields:
                raise CniError("no API server")
            netns.links = []
            return b""

        runner.answers |= {("host-device", "DEL"): delete, ("whereabouts", "DEL"): CniError("no API server")}
        with pytest.raises(CniError, match="^no API server") as caught:
            chain.delete(SANDBOX, one, netns)
        assert not isinstance(caught.value, NothingLeftError)
        assert netns.links == []
        runner.answers["whereabouts", "DEL"] = b""
        with pytest.raises(NothingLeftError):
            chain.delete(SANDBOX, one, netns)

    def test_one_that_refuses_its_version_holds_nothing(self, chain, runner, one):
        """Its ADD has failed, so the plugin of the interface has no result."""
        refusal = IncompatibleVersionError("incompatible CNI versions")
        runner.answers |= {("host-device", "DEL"): refusal, ("whereabouts", "DEL"): refusal}
        with pytest.raises(NothingLeftError):
            chain.delete(SANDBOX, one.with_result(None), in_netns())


class TestOnlyInside:
    """Of sbr and vrf, which change nothing outside of the container's namespace."""

    @pytest.fixture
    def one(self, runner):
        runner.answers["sbr", "DEL"] = CniError("Link not found")
        return attachment(plugins=("bridge", "sbr")).with_result(RESULT)

    def test_without_the_namespace_it_is_not_asked(self, chain, runner, one):
        chain.delete(SANDBOX, one, NETNS)
        assert runner.order == [("bridge", "DEL")]

    def test_it_fails_no_del_of_a_network_that_is_gone(self, chain, runner, one, tmp_path):
        add_and_remember(chain, one)
        with pytest.raises(NothingLeftError, match="^Link not found"):
            chain.delete(SANDBOX, one, in_netns())
        assert list((tmp_path / "results").iterdir())
        chain.forget(SANDBOX, one)
        assert not list((tmp_path / "results").iterdir())

    def test_another_plugin_that_fails_may_have_left_something(self, chain, runner, one):
        runner.answers["bridge", "DEL"] = CniError("busy")
        runner.holds["bridge"] = True
        with pytest.raises(CniError, match="Link not found.*busy") as caught:
            chain.delete(SANDBOX, one, in_netns())
        assert not isinstance(caught.value, NothingLeftError)


class TestCheck:
    @pytest.mark.conformance("verbs-6")
    def test_in_order_each_with_the_stored_result(self, chain, runner):
        chain.check(SANDBOX, attachment().with_result(RESULT), NETNS)
        assert runner.order == [("bridge", "CHECK"), ("portmap", "CHECK"), ("tuning", "CHECK")]
        assert [call.config["prevResult"] for call in runner.calls] == [json.loads(BRIDGE_RESULT)] * 3

    @pytest.mark.parametrize(
        ("version", "disabled"), [("", False), ("0.3.1", False), ("1.0.0", True), ("1.0.0", "true")]
    )
    def test_not_if_the_version_has_none_or_it_is_disabled(self, chain, runner, version, disabled):
        chain.check(SANDBOX, attachment(version, disableCheck=disabled).with_result(RESULT), NETNS)
        assert runner.calls == []

    def test_nothing_stored(self, chain, runner):
        with pytest.raises(InvalidNetworkConfigError, match=r"^the network has no stored result"):
            chain.check(SANDBOX, attachment(), NETNS)
        assert runner.calls == []

    def test_the_first_failure_ends_it(self, chain, runner):
        runner.answers["portmap", "CHECK"] = TryAgainLaterError("gone")
        with pytest.raises(TryAgainLaterError, match=r'^gone .plugin type="portmap".*, CHECK'):
            chain.check(SANDBOX, attachment().with_result(RESULT), NETNS)
        assert len(runner.calls) == 2


class TestPlan:
    def test_good(self, chain, runner):
        whole = attachment(plugins=[{"type": "bridge", "ipam": {"type": "host-local"}}, "portmap"])
        planned = plan_one(chain, SANDBOX, whole)
        assert sorted(runner.located) == ["bridge", "host-local", "portmap"]
        assert runner.calls == []
        # Which IPAM plugin a binary calls is its own affair.
        assert planned == whole
        assert planned.served_by == {"bridge": "/fake/bridge", "portmap": "/fake/portmap"}
        assert whole.served_by == {}

    def test_who_serves_is_told_with_each_call(self, chain, runner):
        planned = plan_one(chain, SANDBOX, attachment())
        add_and_remember(chain, planned)
        chain.check(SANDBOX, planned, NETNS)
        chain.delete(SANDBOX, planned, NETNS)
        assert [call.invocation.served_by for call in runner.calls] == [planned.served_by] * 9

    @pytest.mark.parametrize(
        ("served_by", "here"),
        [
            ({"bridge": "built-in", "host-local": "built-in", "tuning": "built-in"}, True),
            ({"bridge": "built-in", "host-local": "/a/host-local", "tuning": "built-in"}, False),
            ({"bridge": "built-in", "host-local": "built-in", "tuning": "/a/tuning"}, False),
            ({"bridge": "built-in", "tuning": "built-in"}, False),
            ({}, False),
        ],
    )
    def test_here_is_where_all_plugins_are_built_in(self, chain, served_by, here):
        whole = attachment(plugins=[{"type": "bridge", "ipam": {"type": "host-local"}}, "tuning"])
        planned = replace(whole, served_by=served_by)
        assert (chain.adds_here(planned), chain.deletes_here(planned)) == (here, here)

    def test_an_add_that_may_wait_has_a_thread_of_its_own(self, chain, runner):
        planned = replace(attachment(plugins=["macvlan"]), served_by={"macvlan": "built-in"})
        assert (chain.adds_here(planned), chain.deletes_here(planned)) == (False, True)

    @pytest.mark.parametrize("missing", ["bridge", "host-local", "portmap"])
    def test_plugin_missing(self, chain, runner, missing):
        runner.missing.add(missing)
        with pytest.raises(InvalidNetworkConfigError) as caught:
            plan_one(
                chain, SANDBOX, attachment(plugins=[{"type": "bridge", "ipam": {"type": "host-local"}}, "portmap"])
            )
        assert caught.value.msg.startswith(f'failed to find plugin "{missing}" in path [/a /b]')
        assert 'network="web/n1" interface="net1"' in caught.value.msg

    def test_an_ipam_that_only_a_vendors_plugin_knows(self, chain, runner):
        """azure-vnet has its azure-cns inside, and there is no binary of that name."""
        runner.missing.add("azure-cns")
        planned = plan_one(chain, SANDBOX, attachment(plugins=[{"type": "azure-vnet", "ipam": {"type": "azure-cns"}}]))
        assert planned.served_by.keys() == {"azure-vnet"}

    @pytest.mark.conformance("routes-8")
    def test_version(self, chain):
        with pytest.raises(IncompatibleVersionError, match=r"0\.5\.0"):
            plan_one(chain, SANDBOX, attachment("0.5.0"))

    @pytest.mark.parametrize("ifname", ["", "a" * 16, "a/b", ".."])
    def test_interface_name(self, chain, ifname):
        with pytest.raises(InvalidEnvironmentError):
            plan_one(chain, SANDBOX, Attachment("web/n1", attachment().config, ifname))

    @pytest.mark.parametrize(("container_id", "ifname", "most"), [("c" * 64, "net1", 185), ("c" * 128, "i" * 15, 110)])
    def test_network_name(self, runner, cache, container_id, ifname, most):
        """Up to the longest one that the file of its result can have."""
        chain = ListRunner(runner.as_plugins, cache, "/a")
        sandbox = Sandbox(container_id, "/n")
        fits, long = (replace(attachment(name="n" * length), ifname=ifname) for length in (most, most + 1))
        plan_one(chain, sandbox, fits)
        add_and_remember(chain, fits, sandbox)
        with pytest.raises(InvalidNetworkConfigError) as caught:
            plan_one(chain, sandbox, long)
        assert caught.value.code == 7
        assert caught.value.msg.startswith(f"network name is too long: {most + 1} bytes, and {most} is the most here")

    def test_what_has_too_long_a_name_is_let_go_of_all_the_same(self, chain, runner, caplog):
        # So that there are cached results to look through.
        add_and_remember(chain, attachment(plugins=["bridge"]))
        runner.calls.clear()
        long = attachment("1.1.0", name="n" * 250)
        chain.delete(SANDBOX, long, NETNS)
        chain.check(SANDBOX, long.with_result(RESULT), NETNS)
        chain.gc(long.config, [])
        chain.status(long.config)
        assert [verb for name, verb in runner.order if name == "bridge"] == ["DEL", "CHECK", "GC", "STATUS"]
        assert len(runner.order) == 12
        assert caplog.text == ""


def network(version="1.1.0", plugins=("bridge", "portmap", "tuning"), **extra):
    return attachment(version, plugins, **extra).config


class TestStatus:
    @pytest.mark.conformance("verbs-25")
    def test_each_plugin_gets_its_object_and_nothing_of_a_container(self, chain, runner):
        bridge = {"type": "bridge", "capabilities": {"mac": True}, "mtu": 1400}
        chain.status(network(plugins=[bridge, "portmap"]))
        assert runner.order == [("bridge", "STATUS"), ("portmap", "STATUS")]
        assert runner.calls[0].config == {**bridge, "name": "n1", "cniVersion": "1.1.0"}
        call = runner.calls[0].invocation
        assert (call.container_id, call.netns, call.ifname, call.args, call.path) == ("", "", "", "", "/a:/b")

    @pytest.mark.weak_spot(11)
    @pytest.mark.conformance("verbs-27")
    @pytest.mark.parametrize("code", [50, 51, 11, 117])
    def test_the_first_failure_ends_it_with_its_code(self, chain, runner, code):
        runner.answers["portmap", "STATUS"] = errors.from_code(code, "no ranges left", "see the log")
        with pytest.raises(CniError) as caught:
            chain.status(network())
        assert (caught.value.code, caught.value.details) == (code, "see the log")
        assert caught.value.msg == 'no ranges left (plugin type="portmap" network="n1", STATUS)'
        assert len(runner.calls) == 2

    @pytest.mark.parametrize("version", ["", "0.3.1", "0.4.0", "1.0.0"])
    def test_skipped_where_the_version_has_none(self, chain, runner, version):
        chain.status(network(version))
        assert runner.calls == []


VALID = (("c1", "eth0"), ("c2", "net1"))
BOTH_KEYS = ("cni.dev/valid-attachments", "cni.dev/attachments")


class TestGc:
    @pytest.mark.conformance("verbs-29")
    @pytest.mark.parametrize("valid", [VALID, ()])
    def test_both_names_of_the_key(self, chain, runner, valid):
        chain.gc(network(), valid)
        assert runner.order == [("bridge", "GC"), ("portmap", "GC"), ("tuning", "GC")]
        pairs = [{"containerID": container_id, "ifname": ifname} for container_id, ifname in valid]
        expected = {"type": "tuning", "name": "n1", "cniVersion": "1.1.0"} | dict.fromkeys(BOTH_KEYS, pairs)
        assert runner.calls[2].config == expected
        call = runner.calls[2].invocation
        assert (call.container_id, call.netns, call.ifname, call.args, call.path) == ("", "", "", "", "/a:/b")

    def test_every_plugin_past_failures_that_are_joined(self, chain, runner):
        runner.answers["bridge", "GC"] = TryAgainLaterError("busy", "later")
        runner.answers["tuning", "GC"] = CniError("boom", "now")
        with pytest.raises(TryAgainLaterError) as caught:
            chain.gc(network(), VALID)
        assert len(runner.calls) == 3
        assert caught.value.msg.startswith('busy (plugin type="bridge" network="n1", GC); boom (plugin type="tuning"')
        assert caught.value.details == "later; now"

    @pytest.mark.parametrize("version", ["", "0.3.1", "1.0.0"])
    def test_skipped_where_the_version_has_none(self, chain, runner, version):
        chain.gc(network(version), VALID)
        assert runner.calls == []

    @pytest.mark.parametrize("value", [True, "true"])
    def test_disabled(self, chain, runner, value):
        chain.gc(network(disableGC=value), VALID)
        assert runner.calls == []


@pytest.mark.parametrize(
    ("plugin", "ipam"), [("ptp", "ptp"), ("bridge", "ptp"), ("acme", "bridge"), ("acme", "acme"), ("macvlan", "tuning")]
)
def test_an_ipam_plugin_that_would_call_itself_is_refused(chain, runner, plugin, ipam):
    """It did, until there were no processes left."""
    asked = attachment(plugins=({"type": plugin, "ipam": {"type": ipam}},))
    with pytest.raises(InvalidNetworkConfigError, match=f'^ipam.type "{ipam}" is not an IPAM plugin, .*"web/n1"'):
        plan_one(chain, SANDBOX, asked)
    assert runner.calls == []
