"""The built-in flannel against the kernel and beside the reference plugin."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import hypothesis
import hypothesis.strategies as st
import pytest

from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.plugin import HostTools
from multus_daemon.runtime import deadline
from multus_daemon.runtime.deadline import Interrupted
from multus_daemon.spec.cni.errors import TryAgainLaterError
from multus_daemon.spec.cni.result import Result
from tests.aside import Aside
from tests.fakes.runner import PlayedPlugin
from tests.namespaces import remove_netns
from tests.netns import outcome, reference
from tests.waiting import PATIENCE

RUNS: Final = ("flannel's cni-plugin",)
MakeCall = Callable[..., Call]


ENV = {
    "FLANNEL_NETWORK": "10.244.0.0/16",
    "FLANNEL_SUBNET": "10.244.7.1/24",
    "FLANNEL_MTU": "1450",
    "FLANNEL_IPMASQ": "true",
}
ENV_V6 = {"FLANNEL_IPV6_NETWORK": "fd44::/48", "FLANNEL_IPV6_SUBNET": "fd44:0:0:7::1/64"}


def text_of(env: dict[str, str]) -> str:
    return "".join(f"{key}={value}\n" for key, value in env.items())


def flannel(directory: Path, env: Any = None, **keys: Any) -> dict[str, Any]:
    """A configuration whose files are below `directory`, subnet.env among them."""
    directory.mkdir(exist_ok=True)
    (directory / "subnet.env").write_text(env if isinstance(env, str) else text_of(ENV if env is None else env))
    config = {"cniVersion": "1.0.0", "name": "cbr0", "type": "flannel", "subnetFile": str(directory / "subnet.env")}
    ipam = {"dataDir": str(directory / "leases")}
    return {**config, "dataDir": str(directory / "a" / "data"), "ipam": ipam, **keys}


def saved(directory: Path) -> bytes:
    return (directory / "a" / "data" / "container1").read_bytes()


# --- with the built-in bridge ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("delegate", [{}, {"hairpinMode": True, "isDefaultGateway": True}], ids=["default", "keys"])
def test_add_check_and_del(host: Any, netns: Any, tmp_path: Path, delegate: dict[str, Any]) -> None:
    config = flannel(tmp_path, ENV | ENV_V6, delegate=delegate)
    made = outcome.builtin("flannel", "ADD", netns.path, config)
    assert made.result is not None
    assert [item["name"] for item in made.result["interfaces"]][::2] == ["cni0", "eth0"]
    assert [item["address"] for item in made.result["ips"]] == ["10.244.7.2/24", "fd44:0:0:7::2/64"]
    assert [item["dst"] for item in made.result["routes"]][:2] == ["10.244.0.0/16", "fd44::/48"]
    (link,) = netns.ip("link", "show", "dev", "eth0")
    assert link["mtu"] == 1450
    assert netns.reaches("10.244.7.1")
    file = tmp_path / "a" / "data" / "container1"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)

    for verb in ("CHECK", "STATUS"):
        checked = outcome.builtin("flannel", verb, netns.path, config | {"cniVersion": "1.1.0"})
        assert checked == outcome.Outcome()
    # Another one of the node changes nothing for what is there.
    (tmp_path / "subnet.env").unlink()
    for _ in range(2):
        assert outcome.builtin("flannel", "DEL", netns.path, config) == outcome.Outcome()
        assert netns.links() == set()
        assert not file.exists()
    assert not list((tmp_path / "leases" / "cbr0").glob("10.*"))


@pytest.mark.parametrize("backend", ["iptables", "nftables"])
@pytest.mark.parametrize("plugin", ["bridge", "ptp"])
@pytest.mark.parametrize("is_gone", [False, True])
def test_rules_of_an_interface_that_has_lost_its_address(
    is_gone: bool, plugin: str, backend: str, host: Any, netns: Any, tmp_path: Path, tools: HostTools
) -> None:
    """The delegate's DEL is told what the ADD answered, which the saved configuration does not hold."""
    delegate = {"type": plugin, "ipMasqBackend": backend}
    config = flannel(tmp_path, ENV | ENV_V6 | {"FLANNEL_IPMASQ": "false"}, delegate=delegate)
    made = outcome.builtin("flannel", "ADD", netns.path, config, tools=tools)
    assert [line for line in reference.rules(host) if "container1" in line]
    if is_gone:
        remove_netns(Path(netns.path))
    else:
        netns.batch("addr flush dev eth0", "addr add 10.244.7.77/24 dev eth0")
    after = config | {"prevResult": made.result}
    assert outcome.builtin("flannel", "DEL", netns.path, after, tools=tools) == outcome.Outcome()
    assert [line for line in reference.rules(host) if "container1" in line or "CNI-" in line] == []


def test_files_are_below_the_hosts_root(netns: Any, tmp_path: Path, make_call: MakeCall, ipam: Any) -> None:
    (tmp_path / "run" / "flannel").mkdir(parents=True)
    (tmp_path / "run" / "flannel" / "subnet.env").write_text(text_of(ENV))
    config = {"cniVersion": "1.0.0", "name": "cbr0", "type": "flannel"}
    made = outcome.builtin("flannel", "ADD", netns.path, config, host_root=tmp_path, ipam=ipam.plugin_for)
    assert not made.failed
    (call,) = ipam.calls
    assert (call[0], call[1].stdin) == (
        "bridge",
        (tmp_path / "var" / "lib" / "cni" / "flannel" / "container1").read_bytes(),
    )


def test_any_plugin_can_be_the_delegate(netns: Any, tmp_path: Path, ipam: Any) -> None:
    config = flannel(tmp_path, delegate={"type": "anything", "key": {"b": 1, "a": [1.5]}}, prevResult={"ips": []})
    config |= {"cniVersion": "0.4.0", "runtimeConfig": {"mac": "x"}, "args": {"cni": {}}}
    ipam.result = {"cniVersion": "0.4.0", "ips": [{"version": "4", "address": "10.244.7.2/24"}]}
    made = outcome.builtin("flannel", "ADD", netns.path, config, args="FOO=1", ipam=ipam.plugin_for)
    assert made.result == ipam.result
    ((plugin_type, invocation),) = ipam.calls
    assert (plugin_type, invocation.verb, invocation.args, invocation.netns) == ("anything", "ADD", "FOO=1", netns.path)
    assert json.loads(invocation.stdin) == {
        "cniVersion": "0.4.0",
        "name": "cbr0",
        "type": "anything",
        "key": {"b": 1, "a": [1.5]},
        "ipMasq": False,
        "mtu": 1450,
        "runtimeConfig": {"mac": "x"},
        "ipam": {
            "type": "host-local",
            "dataDir": str(tmp_path / "leases"),
            "ranges": [[{"subnet": "10.244.7.0/24"}]],
            "routes": [{"dst": "10.244.0.0/16"}],
        },
    }


def test_a_failed_delegate_is_undone(netns: Any, tmp_path: Path, ipam: Any) -> None:
    config = flannel(tmp_path)
    ipam.errors = {"ADD": TryAgainLaterError("later")}
    made = outcome.builtin("flannel", "ADD", netns.path, config, ipam=ipam.plugin_for)
    assert (made.code, made.msg) == (11, "later")
    assert ipam.verbs == ["ADD", "DEL"]
    assert ipam.calls[0][1].stdin == ipam.calls[1][1].stdin
    assert not list((tmp_path / "a" / "data").iterdir())


def test_what_was_there_before_a_failed_add_stays(host: Any, netns: Any, tmp_path: Path) -> None:
    config = flannel(tmp_path)
    outcome.builtin("flannel", "ADD", netns.path, config)
    before = reference.state(netns), saved(tmp_path)
    again = outcome.builtin("flannel", "ADD", netns.path, config | {"delegate": {"mtu": 1300}})
    assert "already exists" in again.msg
    assert (reference.state(netns), saved(tmp_path)) == before
    assert not (outcome.builtin("flannel", "DEL", netns.path, config)).failed
    assert netns.links() == set()


def test_a_stopped_add_is_undone(netns: Any, tmp_path: Path, make_call: MakeCall, ipam: Any) -> None:
    entered = threading.Event()

    class Slow:
        verbs: list[str] = []  # noqa: RUF012

        def run(self, plugin_type: str, invocation: Any, netns: Any) -> Result:
            deadline.check()
            self.verbs.append(invocation.verb)
            if invocation.verb == "ADD":
                entered.set()
                deadline.pause(PATIENCE)
            return Result()

    work = Aside(
        outcome.builtin,
        "flannel",
        "ADD",
        netns.path,
        flannel(tmp_path),
        ipam=lambda name, _: PlayedPlugin(name, Slow().run),
    )
    assert entered.wait(PATIENCE)
    assert saved(tmp_path)
    work.stop()
    with pytest.raises(Interrupted):
        work.result()
    assert Slow.verbs == ["ADD", "DEL"]
    assert not list((tmp_path / "a" / "data").iterdir())


def test_a_failed_del_can_be_repeated(netns: Any, tmp_path: Path, ipam: Any) -> None:
    config = flannel(tmp_path)
    outcome.builtin("flannel", "ADD", netns.path, config, ipam=ipam.plugin_for)
    ipam.errors = {"DEL": TryAgainLaterError("later")}
    assert (outcome.builtin("flannel", "DEL", netns.path, config, ipam=ipam.plugin_for)).code == 11
    ipam.errors = {}
    assert not (outcome.builtin("flannel", "DEL", "", config, ipam=ipam.plugin_for)).failed
    assert ipam.verbs == ["ADD", "DEL", "DEL"]


@pytest.mark.parametrize("is_saved", [True, False])
def test_what_a_killed_add_was_writing_goes_with_the_del(netns: Any, tmp_path: Path, ipam: Any, is_saved: bool) -> None:
    config = flannel(tmp_path)
    outcome.builtin("flannel", "ADD", netns.path, config, ipam=ipam.plugin_for)
    directory = tmp_path / "a" / "data"
    for name in ("container1", "container2"):
        (directory / f".{name}.4194305-00000000-{'0' * 12}").touch()
    if not is_saved:
        (directory / "container1").unlink()
    assert not (outcome.builtin("flannel", "DEL", netns.path, config, ipam=ipam.plugin_for)).failed
    # Another container's is for its own DEL.
    assert [path.name for path in directory.iterdir()] == [f".container2.4194305-00000000-{'0' * 12}"]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"type": 5}'])
def test_a_saved_file_that_is_none(netns: Any, tmp_path: Path, ipam: Any, content: str, caplog: Any) -> None:
    config = flannel(tmp_path)
    (tmp_path / "a" / "data").mkdir(parents=True)
    (tmp_path / "a" / "data" / "container1").write_text(content)
    assert not (outcome.builtin("flannel", "DEL", netns.path, config, ipam=ipam.plugin_for)).failed
    assert ipam.calls == []
    assert "failed to parse netconf" in caplog.text


def test_where_nothing_can_be_saved_nothing_is_made(netns: Any, tmp_path: Path, ipam: Any) -> None:
    config = flannel(tmp_path, dataDir=str(tmp_path / "subnet.env"))
    made = outcome.builtin("flannel", "ADD", netns.path, config, ipam=ipam.plugin_for)
    assert made.msg.startswith("failed to save the delegate's configuration")
    assert ipam.calls == []


# --- beside the reference --------------------------------------------------------------------------------------------

needs = reference.needs("flannel")
ROUTE = {"dst": "192.0.2.0/24", "gw": "10.244.7.9", "mtu": 1400, "advmss": 1000, "priority": 5, "table": 0, "scope": 0}

# What subnet.env says, and keys of the configuration.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (ENV, {}),
    "v6": (ENV_V6 | {"FLANNEL_MTU": "1280", "FLANNEL_IPMASQ": "true"}, {}),
    "dual": (ENV | ENV_V6, {}),
    "networks": (ENV | {"FLANNEL_NETWORK": "10.244.0.0/16,10.245.3.4/16,10.244.9.9/16"}, {}),
    "v4-network-v6-subnet": (
        {"FLANNEL_NETWORK": "10.244.0.0/16", "FLANNEL_IPV6_SUBNET": "fd44::1/64"}
        | {"FLANNEL_MTU": "1450", "FLANNEL_IPMASQ": "true"},
        {},
    ),
    "carriage-returns": (text_of(ENV).replace("\n", "\r\n"), {}),
    "other-lines": ("# nothing\n\nFOO=1\nFLANNEL\n" + text_of(ENV), {}),
    "masquerades-oddly": (ENV | {"FLANNEL_IPMASQ": "True"}, {"delegate": {"ipMasq": False}}),
    "named": (ENV, {"delegate": {"bridge": "br-test", "hairpinMode": True, "isDefaultGateway": True}}),
    "own-values": (ENV, {"delegate": {"mtu": 1300, "ipMasq": False, "isGateway": False}}),
    "null-values": (ENV, {"delegate": {"mtu": None, "ipMasq": None}}),
    "other-case": (ENV, {"delegate": {"MTU": 1300}}),
    "version-of-the-delegate": (ENV, {"delegate": {"cniVersion": "0.3.1"}}),
    "runtime": (ENV, {"runtimeConfig": {"mac": "02:00:00:00:00:77"}}),
    "runtime-replaces": (ENV, {"runtimeConfig": {}, "delegate": {"runtimeConfig": {"mac": "02:00:00:00:00:77"}}}),
    "ptp": (ENV, {"delegate": {"type": "ptp"}}),
    "delegate-null": (ENV, {"delegate": None}),
    "escapes": (ENV, {"delegate": {"dns": {"domain": "a<b>&c\u2028"}}}),
    "0.3.1": (ENV, {"cniVersion": "0.3.1"}),
}
IPAM_CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "routes": (ENV, {"routes": [ROUTE, {"dst": "fd00::1/64", "other": 1}]}),
    "routes-null": (ENV, {"routes": None}),
    "ranges-are-lost": (ENV, {"ranges": [[{"subnet": "10.1.0.0/24"}]]}),
    "one-more-range": (ENV, {"subnet": "fd55::/64"}),
}


def prepared(case: str, directory: Path) -> dict[str, Any]:
    if case in IPAM_CASES:
        env, section = IPAM_CASES[case]
        config = flannel(directory, env)
        return config | {"ipam": config["ipam"] | section}
    env, keys = CASES[case]
    return flannel(directory, env, **keys)


def both_sides(host: Any, pod: Any) -> list[str]:
    lines = [f"host {line}" for line in reference.state(host)]
    return [*lines, *(f"pod {line}" for line in reference.state(pod))]


def comparable(result: Any) -> Any:
    for item in result.get("interfaces", []):
        for key in ("mac", "sandbox"):
            item.pop(key, None)
        if item["name"].startswith("veth"):
            item["name"] = "PORT"
    return result


@needs
@reference.needs("bridge", "ptp", "host-local")
@pytest.mark.parametrize("case", [*CASES, *IPAM_CASES])
def test_both_leave_the_same(
    case: str, host: Any, another_host: Any, make_netns: Any, tmp_path: Path, tools: Any
) -> None:
    theirs, ours = make_netns(), make_netns()
    config = prepared(case, tmp_path / "same")
    expected = outcome.of_reference("flannel", "ADD", theirs.path, config)
    expected_state, expected_file = both_sides(host, theirs), saved(tmp_path / "same")
    assert not outcome.of_reference("flannel", "DEL", theirs.path, config).failed
    (tmp_path / "same" / "leases" / "cbr0" / "last_reserved_ip.0").unlink(missing_ok=True)
    (tmp_path / "same" / "leases" / "cbr0" / "last_reserved_ip.1").unlink(missing_ok=True)
    with another_host() as side:
        made = outcome.builtin("flannel", "ADD", ours.path, config, tools=tools)
        assert (made.msg, expected.msg) == ("", "")
        assert saved(tmp_path / "same") == expected_file
        reference.require_same(both_sides(side, ours), expected_state)
    assert comparable(made.result) == comparable(expected.result)


@needs
@reference.needs("bridge", "ptp", "host-local")
@pytest.mark.parametrize("case", [*CASES, *IPAM_CASES])
@pytest.mark.parametrize("ours_adds", [True, False])
def test_each_removes_what_the_other_made(
    case: str, ours_adds: bool, host: Any, netns: Any, tmp_path: Path, tools: Any
) -> None:
    config = prepared(case, tmp_path / "files")
    for verb, ours in (("ADD", ours_adds), ("CHECK", not ours_adds), ("DEL", not ours_adds)):
        if verb == "CHECK" and config["cniVersion"] == "0.3.1":
            continue
        if ours:
            made = outcome.builtin("flannel", verb, netns.path, config, tools=tools)
        else:
            made = outcome.of_reference("flannel", verb, netns.path, config)
        assert made.msg == ""
    assert netns.links() == set()
    assert not list((tmp_path / "files" / "a" / "data").iterdir())
    assert not [path for path in (tmp_path / "files" / "leases" / "cbr0").iterdir() if path.name[0].isdecimal()]


@needs
@pytest.mark.parametrize(
    ("env", "keys"),
    [
        ("", {}),
        ("FLANNEL_MTU=1450\n", {}),
        *((({key: value for key, value in ENV.items() if key != missing}), {}) for missing in ENV),
        (ENV | {"FLANNEL_NETWORK": "10.244.0.0"}, {}),
        (ENV | {"FLANNEL_NETWORK": "10.244.0.0/16, 10.245.0.0/16"}, {}),
        (ENV | {"FLANNEL_SUBNET": ""}, {}),
        (ENV | {"FLANNEL_IPV6_SUBNET": "fd44::/129"}, {}),
        (ENV | {"FLANNEL_MTU": "-1"}, {}),
        (ENV | {"FLANNEL_MTU": "4294967296"}, {}),
        (ENV | {"FLANNEL_MTU": " 1450"}, {}),
        (ENV, {"delegate": {"type": 5}}),
        (ENV, {"delegate": {"type": None}}),
        (ENV, {"delegate": {"name": "x"}}),
        (ENV, {"delegate": {"ipam": {}}}),
        (ENV, {"delegate": "bridge"}),
        (ENV, {"subnetFile": "/nowhere/subnet.env"}),
        (ENV, {"subnetFile": 5}),
        (ENV, {"ipam": {"routes": [{"dst": "nonsense"}]}}),
        (ENV, {"delegate": {"type": "no-such-plugin"}}),
    ],
)
def test_both_refuse_for_the_same_reason(env: Any, keys: dict[str, Any], netns: Any, tmp_path: Path) -> None:
    config = flannel(tmp_path, env, **keys)
    ours = outcome.builtin("flannel", "ADD", netns.path, config)
    assert netns.links() == set()
    assert not list(tmp_path.glob("a/data/*"))
    theirs = outcome.of_reference("flannel", "ADD", netns.path, config)
    outcome.require_same_failure(ours, theirs)


def test_a_line_without_a_value(netns: Any, tmp_path: Path) -> None:
    """The reference ends in a panic there."""
    made = outcome.builtin("flannel", "ADD", netns.path, flannel(tmp_path, text_of(ENV) + "FLANNEL_MTU\n"))
    assert "FLANNEL_MTU has no value" in made.msg


_NETWORK = st.builds(lambda ip, bits: f"{ip}/{bits}", st.ip_addresses(v=4), st.integers(0, 33))
_NETWORK_V6 = st.builds(
    lambda ip, bits: f"{ip}/{bits}", st.ip_addresses(v=6).filter(lambda ip: int(ip) >> 64 != 0), st.integers(0, 128)
)
_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.sampled_from(["", "a<b", "é\u2028"])),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("zbA"), inner, max_size=2)),
    max_leaves=4,
)


@needs
@hypothesis.given(
    env=st.fixed_dictionaries(
        {
            "FLANNEL_MTU": st.sampled_from(["1450", "0", "01280", "x"]),
            "FLANNEL_IPMASQ": st.sampled_from(["true", "no"]),
        },
        optional={
            "FLANNEL_NETWORK": st.lists(_NETWORK, min_size=1, max_size=3).map(",".join),
            "FLANNEL_SUBNET": _NETWORK,
            "FLANNEL_IPV6_NETWORK": st.lists(_NETWORK_V6, min_size=1, max_size=2).map(",".join),
            "FLANNEL_IPV6_SUBNET": _NETWORK_V6,
        },
    ),
    delegate=st.dictionaries(st.sampled_from(["mtu", "ipMasq", "isGateway", "vlan", "bridge", "x"]), _JSON, max_size=3),
    section=st.dictionaries(st.sampled_from(["ranges", "dataDir", "subnet", "type"]), _JSON, max_size=2),
    routes=st.lists(
        st.fixed_dictionaries(
            {"dst": st.one_of(_NETWORK, _NETWORK_V6)},
            optional={"gw": st.sampled_from(["10.1.2.3", "fd00::1", ""]), "mtu": st.integers(0, 9), "x": _JSON},
        ),
        max_size=2,
    ),
)
@reference.examples(60)
def test_any_configuration(
    env: dict[str, str],
    delegate: dict[str, Any],
    section: dict[str, Any],
    routes: list[Any],
    netns: Any,
    tmp_path: Path,
    ipam: Any,
) -> None:
    """The built-in and the reference compose the same configuration, byte for byte."""
    program = tmp_path / "bin" / "stub"
    program.parent.mkdir(exist_ok=True)
    program.write_text('#!/bin/sh\ncat >/dev/null\n[ "$CNI_COMMAND" = DEL ] || echo \'{"cniVersion":"1.0.0"}\'\n')
    program.chmod(0o755)
    config = flannel(tmp_path, env, delegate=delegate | {"type": "stub"}, ipam=section | {"routes": routes})
    ours = outcome.builtin("flannel", "ADD", netns.path, config, ipam=ipam.plugin_for)
    content = None if ours.failed else saved(tmp_path)
    theirs = outcome.of_reference("flannel", "ADD", netns.path, config, bin_dir=program.parent)
    assert ours.failed == theirs.failed, (ours.msg, theirs.msg)
    if content is not None:
        assert (content, ipam.calls[-1][1].stdin) == (saved(tmp_path), content)
    assert not outcome.of_reference("flannel", "DEL", netns.path, config, bin_dir=program.parent).failed
