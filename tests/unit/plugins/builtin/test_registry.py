"""Check the runner's validation before a built-in works, and its handling of the built-in's exceptions."""

import contextlib
import json
import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin.registry import PLUGINS, Builtin
from multus_daemon.plugins.plugin import ToolNotFoundError
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import BUILT_IN, Invocation, ToolExit
from multus_daemon.spec.cni import conf, gojson, result
from multus_daemon.spec.cni.errors import (
    CniError,
    InvalidNetworkConfigError,
    TryAgainLaterError,
    UnsupportedFieldError,
)
from multus_daemon.spec.cni.gojson import JsonError
from multus_daemon.spec.cni.result import Interface, IpConfig, Result
from tests import calls
from tests.fakes.runner import FakePluginRunner

SUPPORTED = '["0.1.0" "0.2.0" "0.3.0" "0.3.1" "0.4.0" "1.0.0" "1.1.0"]'


class Recorder:
    """A built-in plugin that notes its calls and can be told to fail."""

    def __init__(self, result=None, error=None, delay=0.0):
        self.calls = []
        self.sessions = []
        self.result, self.error, self.delay = result or Result(), error, delay
        self.unknown = ""

    def unsupported(self, call):
        if self.unknown == "unreadable":
            raise JsonError("no JSON of ours")
        return self.unknown

    def read(self, call):
        self._note("read", call)

    def _note(self, verb, call):
        self.calls.append((verb, call))
        deadline.pause(self.delay)
        if self.error is not None:
            raise self.error
        return self.result

    def add(self, call, session):
        self.sessions.append(session)
        return self._note("add", call)

    def delete(self, call, session):
        self.sessions.append(session)
        self._note("delete", call)

    def check(self, call, session):
        self.sessions.append(session)
        self._note("check", call)

    def status(self, call):
        self._note("status", call)


def invocation(verb, config, **more):
    return Invocation(verb, "c1", "/run/netns/x", "eth0", "", "/opt/cni/bin", config, **more)


@pytest.fixture
def recorder():
    return Recorder()


def run(recorder, tmp_path, verb, stdin, **options):
    """`stdin`: what becomes JSON, or bytes; what is no object is read as `multus-builtin` reads it."""
    plugin = Builtin("test", tmp_path, module=recorder, **options)
    text = stdin if isinstance(stdin, bytes) else json.dumps(stdin).encode()
    config = gojson.loads_object(text) if isinstance(stdin, dict) else conf.configuration(verb, text)
    return calls.run(plugin, invocation(verb, config))


REFUSED = [
    ("ADD", b"", 6, "error unmarshall network config: unexpected end of JSON input", ""),
    ("GC", b"{", 6, None, ""),
    ("ADD", [], 6, "error unmarshall network config: a JSON object is needed, not an array", ""),
    ("ADD", {"name": 5}, 6, "error unmarshall network config: name: a string is needed, not a number", ""),
    ("ADD", b"null", 7, "missing network name", ""),
    ("STATUS", {"cniVersion": "1.1.0"}, 7, "missing network name", ""),
    ("ADD", {"name": "a b"}, 7, "invalid characters found in network name", "a b"),
    ("FOO", {"name": ""}, 7, "missing network name", ""),
    ("FOO", {"name": "n", "cniVersion": "9.9.9"}, 4, "unknown CNI_COMMAND: FOO", ""),
    ("CHECK", {"name": "n", "cniVersion": "0.3.1"}, 1, "config version does not allow CHECK", ""),
    ("CHECK", {"name": "n"}, 1, "config version does not allow CHECK", ""),
    ("STATUS", {"name": "n", "cniVersion": "1.0.0"}, 1, "config version does not allow STATUS", ""),
    ("GC", {"name": "n", "cniVersion": "1.0.0"}, 1, "config version does not allow GC", ""),
    ("CHECK", {"name": "n", "cniVersion": "x"}, 6, None, ""),
    ("ADD", {"name": "n", "cniVersion": 1}, 6, None, ""),
    (
        "ADD",
        {"name": "n", "cniVersion": "x"},
        1,
        "incompatible CNI versions",
        f'config is "x", plugin supports {SUPPORTED}',
    ),
    (
        "CHECK",
        {"name": "n", "cniVersion": "9.9.9"},
        1,
        "incompatible CNI versions",
        f'config is "9.9.9", plugin supports {SUPPORTED}',
    ),
    ("ADD", {"name": "n", "prevResult": 5}, 6, None, ""),
    ("CHECK", {"name": "n", "cniVersion": "1.0.0", "prevResult": {"cniVersion": "7.0.0"}}, 6, None, ""),
]


@pytest.mark.parametrize(("verb", "stdin", "code", "msg", "details"), REFUSED)
def test_refused(recorder, tmp_path, verb, stdin, code, msg, details):
    with pytest.raises(CniError) as caught:
        run(recorder, tmp_path, verb, stdin)
    assert caught.value.code == code
    if msg is not None:
        assert (caught.value.msg, caught.value.explanation) == (msg, details)
    assert recorder.calls == []


def test_prev_result_error_says_what_it_is_about(recorder, tmp_path):
    with pytest.raises(CniError, match="could not parse prevResult: "):
        run(recorder, tmp_path, "ADD", {"name": "n", "cniVersion": "1.0.0", "prevResult": {"ips": 5}})


@pytest.mark.parametrize("verb", ["DEL", "STATUS", "GC"])
def test_a_bad_prev_result_does_not_stop_a_del(recorder, tmp_path, verb, caplog):
    with caplog.at_level(logging.WARNING):
        assert run(recorder, tmp_path, verb, {"name": "n", "cniVersion": "1.1.0", "prevResult": 5}) == Result()
    assert "continues without prevResult" in caplog.text
    assert all(call.prev_result is None for _, call in recorder.calls)


@pytest.mark.parametrize(
    ("verb", "method"), [("DEL", ["delete"]), ("CHECK", ["check"]), ("STATUS", ["status"]), ("GC", [])]
)
def test_verbs_without_output(recorder, tmp_path, verb, method):
    assert run(recorder, tmp_path, verb, {"name": "n", "cniVersion": "1.1.0"}) == Result()
    assert [name for name, _ in recorder.calls] == method


def test_version_is_answered_by_whoever_reads_the_call(recorder, tmp_path):
    assert run(recorder, tmp_path, "VERSION", {"name": "n"}) == Result()
    assert recorder.calls == []


def test_the_call(recorder, tmp_path):
    stdin = {
        "NAME": "net",
        "cniVersion": "0.4.0",
        "prevResult": {"cniVersion": "0.4.0", "ips": [{"version": "4", "address": "10.0.0.2/24"}]},
    }
    run(recorder, tmp_path, "ADD", stdin)
    ((_, call),) = recorder.calls
    assert (call.name, call.cni_version, call.host_root) == ("net", "0.4.0", tmp_path)
    assert call.prev_result == Result(ips=(IpConfig("10.0.0.2/24"),))
    assert call.fields == stdin
    assert call.invocation.container_id == "c1"
    assert [session.path for session in recorder.sessions] == ["/run/netns/x"]


@pytest.mark.parametrize("written", [{}, {"prevResult": {"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.9/8"}]}}])
def test_a_previous_result_beside_the_configuration_counts(recorder, tmp_path, written):
    given = Result(ips=(IpConfig("10.0.0.2/24"),))
    plugin = Builtin("test", tmp_path, module=recorder)
    calls.run(plugin, invocation("ADD", {"name": "n", "cniVersion": "1.0.0", **written}, prev_result=given))
    ((_, call),) = recorder.calls
    assert call.prev_result is given


@pytest.mark.parametrize("verb", ["ADD", "DEL", "CHECK"])
def test_a_plugin_and_those_that_it_calls_work_in_the_namespace_that_is_given(recorder, tmp_path, verb):
    plugin = Builtin("test", tmp_path, module=recorder)
    first, second = PodNetns("/run/netns/x"), PodNetns("/run/netns/x")
    for netns in (first, first, second):
        plugin.run(invocation(verb, {"name": "n", "cniVersion": "1.0.0"}), netns)
    assert recorder.sessions == [first, first, second]
    assert [call.netns for _, call in recorder.calls] == [first, first, second]


def test_it_calls_built_ins_unless_it_is_given_others(tmp_path):
    recorder, other = Recorder(), FakePluginRunner()
    for plugin_for in (None, other.plugin_for):
        plugin = Builtin("test", tmp_path, module=recorder, plugin_for=plugin_for)
        calls.run(plugin, invocation("DEL", {"name": "n"}))
    (_, alone), (_, given) = recorder.calls
    called = alone.plugin_for("static", alone.invocation)
    assert (called.type, called.place) == ("static", BUILT_IN)
    given.plugin_for("static", given.invocation).run(given.invocation, given.netns)
    assert other.order == [("static", "DEL")]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.2.0", {"cniVersion": "0.2.0", "ip4": {"ip": "10.0.0.2/24"}, "dns": {}}),
        ("1.1.0", {"cniVersion": "1.1.0", "interfaces": [{"name": "e"}], "ips": [{"address": "10.0.0.2/24"}]}),
    ],
)
def test_the_result_is_in_the_version_of_the_configuration(tmp_path, version, expected):
    recorder = Recorder(Result(interfaces=(Interface("e"),), ips=(IpConfig("10.0.0.2/24"),)))
    found = run(recorder, tmp_path, "ADD", {"name": "n", "cniVersion": version})
    assert result.to_object(found, version) == expected
    # In memory as on its way through a process.
    assert found == result.from_object(expected, version)


def test_a_cni_error_passes_unchanged(tmp_path):
    error = CniError("mine", "details", code=123)
    with pytest.raises(CniError) as caught:
        run(Recorder(error=error), tmp_path, "DEL", {"name": "n"})
    assert caught.value is error


@pytest.mark.parametrize(
    ("error", "msg"),
    [(ValueError("broken"), "broken"), (KeyError(), "KeyError"), (TimeoutError("its own"), "its own")],
)
def test_any_other_exception_becomes_999(tmp_path, error, msg):
    with pytest.raises(CniError) as caught:
        run(Recorder(error=error), tmp_path, "ADD", {"name": "n"})
    assert caught.value.to_object() == {"code": 999, "msg": msg}
    assert caught.value.__cause__ is error


def test_deadline(tmp_path):
    with pytest.raises(TryAgainLaterError, match=r'plugin "test" did not end within 0.05 s'):
        run(Recorder(delay=30), tmp_path, "ADD", {"name": "n"}, timeout=0.05)


def test_unknown_types(tmp_path):
    with pytest.raises(InvalidNetworkConfigError, match='failed to find plugin "no-such"'):
        calls.run(Builtin("no-such", tmp_path), invocation("ADD", {"name": "n"}))


@pytest.mark.parametrize("plugin_type", sorted(PLUGINS))
def test_every_registered_plugin_is_there(tmp_path, plugin_type):
    call = invocation("GC", {"name": "n", "cniVersion": "1.1.0"})
    assert calls.run(Builtin(plugin_type, tmp_path), call) == Result()


# --- what a built-in does not know -----------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["ADD", "CHECK", "STATUS"])
def test_what_is_not_known_is_refused_before_anything_is_done(recorder, tmp_path, verb):
    recorder.unknown = "newKey: 5"
    with pytest.raises(UnsupportedFieldError) as caught:
        run(recorder, tmp_path, verb, {"name": "n", "cniVersion": "1.1.0"})
    assert (caught.value.code, caught.value.msg) == (2, "newKey: 5 is not supported by the built-in test")
    assert "install the test binary" in caught.value.explanation
    assert recorder.calls == []


@pytest.mark.parametrize(("verb", "called"), [("DEL", ["delete"]), ("GC", [])])
def test_del_does_what_it_can(recorder, tmp_path, verb, called, caplog):
    """Refused, it would come back for ever, where the ADD has been refused."""
    recorder.unknown = "newKey"
    assert run(recorder, tmp_path, verb, {"name": "n", "cniVersion": "1.1.0", "newKey": "geheim"}) == Result()
    assert [name for name, _ in recorder.calls] == called
    assert f"{verb} by the built-in test ignores newKey, which it does not support" in caplog.text
    assert "geheim" not in caplog.text


def test_the_question_touches_nothing(recorder, tmp_path):
    recorder.unknown = "newKey: 5"
    plugin = Builtin("test", tmp_path, module=recorder)
    for verb in ("ADD", "DEL", "GC"):
        assert plugin.unsupported(invocation(verb, {"name": "n", "cniVersion": "1.1.0"})) == "newKey: 5"
    assert plugin.unsupported(invocation("VERSION", {})) == ""
    # `run` refuses a configuration that can't be used.
    assert plugin.unsupported(invocation("ADD", {"name": 5})) == ""
    recorder.unknown = "unreadable"
    assert plugin.unsupported(invocation("ADD", {"name": "n"})) == ""
    assert recorder.calls == []


KNOWN = [
    ("ptp", {"mtu": 1400, "ipMasq": False, "ipMasqBackend": "future"}),
    ("ptp", {"IPMASQ": False, "deviceID": "0000:01:00.0", "cni.dev/valid-attachments": []}),
    ("ptp", {"newKey": None}),
    ("bridge", {"bridge": "b", "isGateway": True, "vlanTrunk": [{"minID": 1, "maxID": 5}], "portIsolation": True}),
    ("bridge", {"runtimeConfig": {"mac": "x", "ips": []}, "args": {"cni": {"mac": "x"}, "other": {}}}),
    ("bridge", {"mtu": "not a number"}),
    ("host-local", {"bridge": "b", "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.0.0.0/24"}]]}}),
    ("loopback", {"capabilities": {}}),
    ("flannel", {"subnetFile": "f", "dataDir": "d", "delegate": {"any": 1}, "ipam": {"any": 1}}),
    ("macvlan", {"master": "m", "mode": "vepa", "mtu": 1, "mac": "x", "linkInContainer": True, "bcqueuelen": 1}),
    ("macvlan", {"mode": ""}),
    ("macvlan", {"mode": 5}),
    ("bandwidth", {"ingressRate": 1, "ingressBurst": 1, "EGRESSRATE": 1, "egressBurst": 1, "runtimeConfig": {"a": 1}}),
    ("tuning", {"sysctl": {"any": 1}, "mac": 1, "promisc": 1, "mtu": 1, "allmulti": 1, "txQLen": 1, "dataDir": 1}),
    ("portmap", {"snat": 1, "masqAll": 1, "conditionsV4": 1, "conditionsV6": 1, "externalSetMarkChain": 1}),
    ("portmap", {"backend": 1, "markMasqBit": 1, "runtimeConfig": {"portMappings": []}}),
    ("tuning", {"args": {"cni": {"newKey": 1}}, "runtimeConfig": {"ips": []}}),
]
UNKNOWN = [
    ("ptp", {"newKey": {"a": 1}}, "newKey"),
    ("ptp", {"isGateway": True}, "isGateway"),
    ("ptp", {"ipMasq": True}, "ipMasq: true"),
    ("bridge", {"newKey": "x" * 100}, "newKey"),
    ("bridge", {"vlanTrunk": [{"id": 1}, {"step": 2}]}, "vlanTrunk: step"),
    ("bridge", {"macspoofchk": True}, "macspoofchk: true"),
    ("bridge", {"ipMasq": True}, "ipMasq: true"),
    ("host-local", {"ipam": {"type": "host-local", "exclude": []}}, "ipam.exclude"),
    ("host-local", {"ipam": {"ranges": [[{"subnet": "10.0.0.0/24"}, {"vlan": 3}]]}}, "ipam.ranges: vlan"),
    ("loopback", {"newKey": 0}, "newKey"),
    ("flannel", {"backend": "x"}, "backend"),
    ("macvlan", {"mode": "source"}, 'mode: "source"'),
    ("macvlan", {"bccutoff": 5}, "bccutoff"),
    ("bandwidth", {"unshapedSubnets": ["10.0.0.0/8"]}, "unshapedSubnets"),
    ("tuning", {"gsoMaxSize": 5}, "gsoMaxSize"),
    ("portmap", {"runtimeConfig": {"portMappings": [{}]}}, "runtimeConfig.portMappings"),
    ("portmap", {"noSnat": True}, "noSnat"),
]


@pytest.mark.parametrize(("plugin_type", "fields", "expected"), [*((*item, "") for item in KNOWN), *UNKNOWN])
def test_keys(tmp_path, plugin_type, fields, expected):
    stdin = {"cniVersion": "1.0.0", "name": "n", "type": plugin_type, "ipam": {}, "dns": {}, **fields}
    assert Builtin(plugin_type, tmp_path).unsupported(invocation("ADD", stdin)) == expected


SECRET = "geheim"
SECRETS = [
    *(
        (name, {"password": SECRET})
        for name in ("bandwidth", "bridge", "flannel", "loopback", "macvlan", "portmap", "ptp", "tuning")
    ),
    *((name, {"ipam": {"type": name, "password": SECRET}}) for name in ("host-local", "static")),
    ("bridge", {"vlanTrunk": [{"password": SECRET}]}),
    ("host-local", {"ipam": {"type": "host-local", "ranges": [[{"password": SECRET}]]}}),
    ("static", {"ipam": {"type": "static", "addresses": [{"address": "10.0.0.1/8", "password": SECRET}]}}),
]


@pytest.mark.parametrize(("plugin_type", "fields"), SECRETS)
def test_no_value_of_an_unknown_key_is_shown(tmp_path, plugin_type, fields, caplog):
    caplog.set_level("DEBUG")
    plugin = Builtin(plugin_type, tmp_path)
    stdin = {"cniVersion": "1.1.0", "name": "n", "type": plugin_type, **fields}
    for verb in ("ADD", "CHECK", "STATUS"):
        with pytest.raises(UnsupportedFieldError, match=r"password is not supported") as caught:
            calls.run(plugin, invocation(verb, stdin))
        assert SECRET not in f"{caught.value.msg} {caught.value.explanation}"
    for verb in ("DEL", "GC"):
        with contextlib.suppress(CniError):
            calls.run(plugin, invocation(verb, stdin))
    assert "password, which it does not support" in caplog.text
    assert SECRET not in caplog.text


def test_no_value_of_an_unknown_argument_is_shown(tmp_path):
    call = invocation("ADD", {"cniVersion": "1.0.0", "name": "n", "ipam": {"type": "static"}})
    with pytest.raises(CniError, match=r'^ARGS: unknown args \["TOKEN"\]') as caught:
        calls.run(Builtin("static", tmp_path), replace(call, args=f"TOKEN={SECRET}"))
    assert SECRET not in caught.value.explanation


class NoTools:
    """A host without a single program."""

    def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        raise ToolNotFoundError(tool)


@pytest.mark.parametrize(
    ("backend", "expected"), [("iptables", ""), ("nftables", ""), ("ebpf", 'ipMasqBackend: "ebpf"')]
)
def test_backends(tmp_path, backend, expected):
    stdin = {"name": "n", "ipMasq": True, "ipMasqBackend": backend}
    for plugin_type in ("bridge", "ptp"):
        assert Builtin(plugin_type, tmp_path, tools=NoTools()).unsupported(invocation("ADD", stdin)) == expected
