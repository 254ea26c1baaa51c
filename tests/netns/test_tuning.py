"""The built-in tuning against the kernel and beside the reference plugin."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from multus_daemon.kernel.links import Rtnl
from multus_daemon.plugins.builtin import tuning as plugin
from multus_daemon.plugins.builtin import tuning_config
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.spec.cni.errors import CniError, InternalError, InvalidNetworkConfigError, IoFailureError
from tests.netns import outcome, reference
from tests.netns.direct import Direct

MakeCall = Callable[..., Call]

TUNING = Direct(plugin)

MAC = "02:00:00:00:00:77"
SYSCTLS = {"net.ipv4.conf.IFNAME.arp_filter": "1", "net/ipv4/tcp_keepalive_time": "120"}
LOCAL_PORTS = "net.ipv4.ip_local_port_range"


@pytest.fixture
def pod(netns: Any) -> Any:
    """A pod with eth0, which has a MAC address of its own choice."""
    return with_link(netns)


def with_link(netns: Any) -> Any:
    netns.run("ip", "link", "add", "eth0", "address", "02:00:00:00:00:01", "type", "veth", "peer", "name", "other")
    return netns


def previous(path: str, **keys: Any) -> dict[str, Any]:
    interfaces = [{"name": "veth1", "mac": "02:00:00:00:00:02"}]
    interfaces += [{"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": path}]
    ips = [{"interface": 1, "address": "10.1.2.3/24", "gateway": "10.1.2.1"}]
    return {"cniVersion": "1.0.0", "interfaces": interfaces, "ips": ips, **keys}


def tuning(path: str, directory: Path, **keys: Any) -> dict[str, Any]:
    config = {"cniVersion": "1.0.0", "name": "testnet", "type": "tuning", "dataDir": str(directory)}
    return {**config, "prevResult": previous(path), **keys}


def attributes(pod: Any, ifname: str = "eth0") -> dict[str, Any]:
    (link,) = pod.ip("link", "show", "dev", ifname)
    found = {key: link.get(key) for key in ("address", "mtu", "txqlen")}
    return found | {flag: flag in link["flags"] for flag in ("PROMISC", "ALLMULTI")}


def sysctls(pod: Any) -> list[str]:
    names = ("net/ipv4/conf/eth0/arp_filter", "net/ipv4/tcp_keepalive_time", "net/ipv4/ip_local_port_range")
    return [" ".join(pod.sysctl(name).split()) for name in names]


def everything(pod: Any) -> list[str]:
    return [*reference.state(pod), json.dumps(attributes(pod)), *sysctls(pod)]


# --- what it does ----------------------------------------------------------------------------------------------------


def test_add_check_and_del(pod: Any, tmp_path: Path) -> None:
    before = attributes(pod)
    keys = {"sysctl": SYSCTLS, "mac": MAC, "promisc": True, "mtu": 1380, "allmulti": True, "txQLen": 77}
    config = tuning(pod.path, tmp_path / "a" / "b", **keys)
    made = outcome.builtin("tuning", "ADD", pod.path, config)
    assert made.result is not None
    assert [item["mac"] for item in made.result["interfaces"]] == ["02:00:00:00:00:02", MAC]
    assert made.result["ips"] == config["prevResult"]["ips"]
    assert attributes(pod) == {"address": MAC, "mtu": 1380, "txqlen": 77, "PROMISC": True, "ALLMULTI": True}
    assert sysctls(pod)[:2] == ["1", "120"]
    assert outcome.builtin("tuning", "CHECK", pod.path, config) == outcome.Outcome()

    (file,) = (tmp_path / "a" / "b").iterdir()
    assert (file.name, file.stat().st_mode & 0o777) == ("container1_eth0.json", 0o600)
    for _ in range(2):
        assert outcome.builtin("tuning", "DEL", pod.path, config) == outcome.Outcome()
        assert attributes(pod) == before
        # As with the reference: they end with the namespace.
        assert sysctls(pod)[:2] == ["1", "120"]
        assert not file.exists()


def test_an_interface_whose_name_has_dots(netns: Any, tmp_path: Path) -> None:
    netns.run("ip", "link", "add", "eth0.100", "type", "veth", "peer", "name", "other")
    config = tuning(netns.path, tmp_path, sysctl={"net.ipv4.conf.IFNAME.arp_filter": "1"})
    assert not (outcome.builtin("tuning", "ADD", netns.path, config, ifname="eth0.100")).failed
    assert netns.sysctl("net/ipv4/conf/eth0.100/arp_filter") == "1"


def test_a_capture_does_not_count(pod: Any, tmp_path: Path) -> None:
    """Promiscuity is a number of those who want it; the flag that somebody sets is one of them."""
    config = tuning(pod.path, tmp_path, mtu=1300)
    outcome.builtin("tuning", "ADD", pod.path, config)
    pod.run("ip", "link", "add", "br0", "type", "bridge")
    pod.run("ip", "link", "set", "eth0", "master", "br0")
    (link,) = pod.ip("-d", "link", "show", "dev", "eth0")
    assert link["promiscuity"] == 1
    assert not (outcome.builtin("tuning", "CHECK", pod.path, config)).failed
    pod.run("ip", "link", "set", "eth0", "promisc", "on")
    assert "promiscuous mode" in (outcome.builtin("tuning", "CHECK", pod.path, config)).msg


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("ip", "link", "set", "eth0", "address", "02:00:00:00:00:99"), "MAC address"),
        (("ip", "link", "set", "eth0", "promisc", "off"), "promiscuous mode"),
        (("ip", "link", "set", "eth0", "mtu", "1234"), "MTU"),
        (("ip", "link", "set", "eth0", "allmulticast", "off"), "all-multicast"),
        (("ip", "link", "set", "eth0", "txqueuelen", "5"), "Queue Length"),
        (("sysctl", "-w", "net.ipv4.tcp_keepalive_time=121"), "tcp_keepalive_time is 121, not 120"),
        (("ip", "link", "del", "eth0"), 'failed to look for "eth0"'),
    ],
)
def test_check_sees_what_has_changed(pod: Any, tmp_path: Path, change: tuple[str, ...], words: str) -> None:
    keys = {"sysctl": {"net.ipv4.tcp_keepalive_time": "120"}, "mac": MAC, "promisc": True, "mtu": 1380}
    config = tuning(pod.path, tmp_path, **keys, allmulti=True, txQLen=77)
    assert not (outcome.builtin("tuning", "ADD", pod.path, config)).failed
    pod.run(*change)
    assert words in (outcome.builtin("tuning", "CHECK", pod.path, config)).msg


def test_check_passes_over_white_space(pod: Any, tmp_path: Path) -> None:
    """The kernel prints a tab between the values of a list, and nobody writes one."""
    config = tuning(pod.path, tmp_path, sysctl={LOCAL_PORTS: "2000 3000"})
    assert not (outcome.builtin("tuning", "ADD", pod.path, config)).failed
    assert pod.sysctl("net/ipv4/ip_local_port_range") == "2000\t3000"
    assert not (outcome.builtin("tuning", "CHECK", pod.path, config)).failed


# --- what fails ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["mac", "promiscuous", "mtu", "allmulti", "tx_queue_length", "link", ""])
def test_a_failed_add_puts_all_back(
    pod: Any, tmp_path: Path, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    before = everything(pod)
    patched = "link" if method == "link" else "change"
    real = getattr(Rtnl, patched)
    failures: list[str] = []

    def fail_once(kernel: Rtnl, *arguments: Any, **values: Any) -> Any:
        if not failures and method in ("link", *values):
            failures.append(method)
            raise OSError(5, "no luck")
        return real(kernel, *arguments, **values)

    if method:
        monkeypatch.setattr(Rtnl, patched, fail_once)
    keys = {"sysctl": SYSCTLS, "mac": MAC, "promisc": True, "mtu": 1380, "allmulti": True, "txQLen": 77}
    if not method:
        # Valid by its form, and the kernel's to refuse.
        keys["sysctl"] = SYSCTLS | {"net.ipv4.tcp_keepalive_intvl": "nonsense"}
    file = tmp_path / "container1_eth0.json"
    file.write_text("of another tuning in the list")
    with pytest.raises(InternalError, match="no luck" if method else "tcp_keepalive_intvl"):
        TUNING.add(make_call("ADD", pod.path, **tuning(pod.path, tmp_path, **keys)))
    reference.require_same(everything(pod), before)
    assert file.read_text() == "of another tuning in the list"


def test_without_a_place_for_the_backup_nothing_is_changed(pod: Any, tmp_path: Path) -> None:
    before = everything(pod)
    (tmp_path / "file").touch()
    config = tuning(pod.path, tmp_path / "file" / "below", mac=MAC, sysctl=SYSCTLS)
    assert (outcome.builtin("tuning", "ADD", pod.path, config)).failed
    reference.require_same(everything(pod), before)


@pytest.mark.parametrize("code", [errno.ENOBUFS, errno.ENOMEM])
def test_a_kernel_without_memory_leaves_no_file(
    pod: Any, tmp_path: Path, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    TUNING.add(make_call("ADD", pod.path, **tuning(pod.path, tmp_path, mtu=1300)))

    def fail(*_arguments: Any, **_values: Any) -> None:
        raise OSError(code, "no memory")

    monkeypatch.setattr(Rtnl, "change", fail)
    TUNING.delete(make_call("DEL", pod.path, **tuning(pod.path, tmp_path, mtu=1300)))
    assert not list(tmp_path.glob("container1*"))


@pytest.mark.parametrize("method", ["find_link", "change"])
def test_a_kernel_without_memory_for_a_moment(
    pod: Any, tmp_path: Path, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    before, real, calls = attributes(pod), getattr(Rtnl, method), itertools.count()
    config = tuning(pod.path, tmp_path, mac=MAC, mtu=1300, txQLen=77)
    TUNING.add(make_call("ADD", pod.path, **config))

    def fail_each_second(*arguments: Any, **values: Any) -> Any:
        if next(calls) % 2 == 0:
            raise OSError(errno.ENOBUFS, "no memory")
        return real(*arguments, **values)

    monkeypatch.setattr(Rtnl, method, fail_each_second)
    TUNING.delete(make_call("DEL", pod.path, **config))
    monkeypatch.undo()
    assert attributes(pod) == before
    assert not list(tmp_path.glob("container1*"))


@pytest.mark.parametrize("gone", ["link", "namespace", "variable"])
def test_del_with_nothing_to_restore(pod: Any, tmp_path: Path, gone: str) -> None:
    config = tuning(pod.path, tmp_path, mtu=1300)
    outcome.builtin("tuning", "ADD", pod.path, config)
    path = {"namespace": f"{pod.path}-gone", "variable": ""}.get(gone, pod.path)
    if gone == "link":
        pod.run("ip", "link", "del", "eth0")
    assert not (outcome.builtin("tuning", "DEL", path, config)).failed
    assert not list(tmp_path.glob("container1*"))


@pytest.mark.parametrize("content", ["{", '{"mtu": "many"}', '{"mtu": -1}', '{"mac": "x"}', '{"mtu": 1}'])
def test_del_by_a_backup_that_is_none(pod: Any, tmp_path: Path, content: str, caplog: Any) -> None:
    """The last one is none that this kernel takes for a veth; it is kept, as the reference keeps it."""
    file = tmp_path / "container1_eth0.json"
    file.write_text(content)
    before = attributes(pod)
    assert not (outcome.builtin("tuning", "DEL", pod.path, tuning(pod.path, tmp_path))).failed
    assert attributes(pod) == before
    assert file.read_text() == content
    assert "eth0 can't be restored" in caplog.text


def test_del_needs_little(pod: Any, tmp_path: Path) -> None:
    config = tuning(pod.path, tmp_path, mtu=1300)
    before = attributes(pod)
    outcome.builtin("tuning", "ADD", pod.path, config)
    config |= {"mtu": "many", "prevResult": None}
    assert not (outcome.builtin("tuning", "DEL", pod.path, config, args="nonsense")).failed
    assert attributes(pod) == before


@pytest.mark.parametrize(
    ("lines", "key", "allowed"),
    [
        (None, "net.ipv4.tcp_keepalive_time", True),
        ("", "net.ipv4.tcp_keepalive_time", False),
        ("^net.ipv4.conf.IFNAME.[a-z_]*$\n", "net.ipv4.conf.IFNAME.arp_filter", True),
        ("^net.ipv4.conf.IFNAME.[a-z_]*$\n", "net.ipv4.tcp_keepalive_time", False),
        ("nonsense\n  keepalive  \n", "net.ipv4.tcp_keepalive_time", True),
    ],
)
def test_the_allowlist(pod: Any, tmp_path: Path, lines: str | None, key: str, allowed: bool) -> None:
    (tmp_path / "etc" / "cni" / "tuning").mkdir(parents=True)
    if lines is not None:
        (tmp_path / "etc" / "cni" / "tuning" / "allowlist.conf").write_text(lines)
    before = everything(pod)
    config = tuning(pod.path, Path("/data"), sysctl={key: "1"}, mtu=1300)
    made = outcome.builtin("tuning", "ADD", pod.path, config, host_root=tmp_path)
    assert (made.msg.startswith(f"Sysctl {key} is not allowed"), made.failed) == (not allowed, not allowed)
    assert (everything(pod) != before) is allowed
    # Below the host's root.
    assert (tmp_path / "data" / "container1_eth0.json").exists() is allowed


def test_an_allowlist_that_cannot_be_read(pod: Any, tmp_path: Path, make_call: MakeCall) -> None:
    (tmp_path / "etc" / "cni" / "tuning" / "allowlist.conf").mkdir(parents=True)
    config = tuning(pod.path, tmp_path, sysctl=SYSCTLS)
    made = outcome.builtin("tuning", "ADD", pod.path, config, host_root=tmp_path)
    assert (made.code, made.msg.startswith("open ")) == (IoFailureError.default_code, True)


# --- beside the reference --------------------------------------------------------------------------------------------

# Keys of the configuration and CNI_ARGS.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, ""),
    "sysctl": ({"sysctl": SYSCTLS}, ""),
    "sysctl-list": ({"sysctl": {LOCAL_PORTS: "2000\t3000"}}, ""),
    "sysctl-null": ({"sysctl": None}, ""),
    "mac": ({"mac": MAC}, ""),
    "mac-dashes": ({"mac": "02-00-00-00-00-77"}, ""),
    "mac-env": ({"mac": "02:00:00:00:00:01"}, f"MAC={MAC}"),
    "mac-runtime": ({"mac": "nonsense", "runtimeConfig": {"mac": MAC}}, "MAC=02:00:00:00:00:55"),
    "promisc": ({"promisc": True}, ""),
    "promisc-false": ({"promisc": False}, ""),
    "mtu": ({"mtu": 1400}, ""),
    "mtu-0": ({"mtu": 0}, ""),
    "allmulti": ({"allmulti": True}, ""),
    "allmulti-false": ({"allmulti": False}, ""),
    "all": ({"sysctl": SYSCTLS, "mac": MAC, "promisc": True, "mtu": 1500, "allmulti": True}, ""),
    "env-ignored": ({"mtu": 1400}, "IgnoreUnknown=true;K8S_POD_NAME=p"),
}
NEW_CASES: dict[str, tuple[dict[str, Any], str]] = {
    "txqlen": ({"txQLen": 5}, ""),
    "txqlen-0": ({"txQLen": 0}, ""),
    "args": ({"mtu": 1400, "args": {"cni": {"mtu": 1300, "promisc": True, "allmulti": False, "txQLen": 9}}}, ""),
    "args-mac": ({"mac": "nonsense", "args": {"cni": {"mac": MAC}}, "runtimeConfig": {"mac": "x"}}, "MAC=y"),
    "args-mac-empty": ({"mac": "nonsense", "args": {"cni": {"mac": ""}}}, ""),
    "args-null": ({"mtu": 1400, "args": {"cni": {"mtu": None, "sysctl": None}}}, ""),
    "args-sysctl": ({"sysctl": SYSCTLS, "args": {"cni": {"sysctl": {"net/ipv4/tcp_keepalive_time": "99"}}}}, ""),
}
ALL_CASES = [*CASES, *(pytest.param(case, marks=reference.needs_new()) for case in NEW_CASES)]


def comparable(found: outcome.Outcome) -> Any:
    for item in (found.result or {}).get("interfaces", []):
        item["mac"] = item["mac"].replace("-", ":")
        item.pop("sandbox", None)
    return found


@reference.needs("tuning")
@pytest.mark.parametrize("case", ALL_CASES)
def test_both_leave_the_same(case: str, make_netns: Any, tmp_path: Path) -> None:
    keys, args = (CASES | NEW_CASES)[case]
    left = []
    for side in ("theirs", "ours"):
        pod, directory = with_link(make_netns()), tmp_path / side
        config = tuning(pod.path, directory, **keys)
        call = outcome.of_reference if side == "theirs" else outcome.builtin
        made = call("tuning", "ADD", pod.path, config, args=args)
        result = comparable(made)
        assert not result.failed
        files = {item.name: item.read_bytes() for item in directory.iterdir()} if directory.exists() else {}
        left.append((everything(pod), result, files))
    (their_state, *theirs), (our_state, *ours) = left
    reference.require_same(our_state, their_state)
    assert ours == theirs


@reference.needs("tuning")
@pytest.mark.parametrize("case", ALL_CASES)
@pytest.mark.parametrize("ours_adds", [True, False])
def test_each_checks_and_restores_what_the_other_changed(case: str, ours_adds: bool, pod: Any, tmp_path: Path) -> None:
    keys, args = (CASES | NEW_CASES)[case]
    if case == "mac-dashes" and ours_adds:
        # The reference compares the text, and finds its own change wrong.
        keys = {"mac": MAC}
    config = tuning(pod.path, tmp_path / "data", **keys)
    before = attributes(pod)
    for verb, ours in (("ADD", ours_adds), ("CHECK", not ours_adds), ("DEL", not ours_adds)):
        if verb == "CHECK" and reference.is_old() and "sysctl" in keys:
            # v1.1.1 does not replace IFNAME here.
            continue
        if ours:
            assert not (outcome.builtin("tuning", verb, pod.path, config, args=args)).failed
        else:
            reference.run("tuning", verb, pod.path, config, args=args)
    assert attributes(pod) == before
    assert not list(tmp_path.glob("data/*"))


@reference.needs("tuning")
@pytest.mark.parametrize(
    ("keys", "args"),
    [
        ({"prevResult": None}, ""),
        ({"sysctl": {"kernel.hostname": "x"}}, ""),
        ({"sysctl": {"net": "x"}}, ""),
        ({"sysctl": {"net.ipv4.no_such_thing": "1"}}, ""),
        ({"sysctl": {"net.ipv4.conf.IFNAME.arp_filter": 1}}, ""),
        ({"sysctl": {"net.ipv4.tcp_keepalive_time": "nonsense"}}, ""),
        ({"mac": "nonsense"}, ""),
        ({}, "MAC=nonsense"),
        ({}, "FOO=1"),
        ({"mtu": "1400"}, ""),
        ({"promisc": "yes"}, ""),
        ({"mtu": 10}, ""),
        ({"allmulti": 1}, ""),
        ({"ifname": "eth7", "mtu": 1400}, ""),
    ],
)
def test_both_refuse_for_the_same_reason(keys: dict[str, Any], args: str, pod: Any, tmp_path: Path) -> None:
    keys = dict(keys)
    options = {"ifname": keys.pop("ifname", "eth0"), "args": args}
    before = everything(pod)
    config = tuning(pod.path, tmp_path / "ours", **keys)
    ours = outcome.builtin("tuning", "ADD", pod.path, config, **options)
    reference.require_same(everything(pod), before)
    theirs = outcome.of_reference("tuning", "ADD", pod.path, config | {"dataDir": str(tmp_path / "theirs")}, **options)
    outcome.require_same_failure(ours, theirs)


@reference.needs("tuning")
def test_a_sysctl_with_two_values(pod: Any, tmp_path: Path, make_call: MakeCall) -> None:
    config = tuning(pod.path, tmp_path, sysctl={"net.ipv4.tcp_keepalive_time": "1"})
    text = json.dumps(config).replace('"sysctl": {', '"sysctl": {"net.ipv4.tcp_keepalive_time": "2", ')
    call = make_call("ADD", pod.path, **config)
    call = dataclasses.replace(call, invocation=dataclasses.replace(call.invocation, raw=text.encode()))
    for verb in (TUNING.add, TUNING.check):
        with pytest.raises(InvalidNetworkConfigError, match="duplicated sysctl keys are not allowed"):
            verb(call)


@reference.needs("tuning")
@reference.needs_new()
@hypothesis.given(
    keys=st.fixed_dictionaries(
        {},
        optional={
            "mac": st.binary(min_size=5, max_size=5).map(lambda raw: f"02:{raw.hex(':')}"),
            "promisc": st.booleans(),
            "mtu": st.sampled_from([0, 68, 1280, 1500, 9000]),
            "allmulti": st.booleans(),
            "sysctl": st.dictionaries(
                st.sampled_from(["net.ipv4.conf.IFNAME.arp_filter", "net/ipv4/conf/IFNAME/log_martians"]),
                st.sampled_from(["0", "1"]),
            ),
        },
    ),
    start=st.tuples(st.sampled_from([1000, 1500]), st.sampled_from(["on", "off"]), st.sampled_from(["on", "off"])),
)
@reference.examples(20)
def test_any_configuration(keys: dict[str, Any], start: tuple[int, str, str], make_netns: Any, tmp_path: Path) -> None:
    """Both implementations do the same on ADD and DEL of an interface that was changed before."""
    left = []
    for side in ("theirs", "ours"):
        pod, directory = with_link(make_netns()), tmp_path / side
        mtu, promiscuous, allmulti = start
        pod.run("ip", "link", "set", "eth0", "mtu", str(mtu), "promisc", promiscuous, "allmulticast", allmulti)
        config = tuning(pod.path, directory, **keys)
        states: list[Any] = []
        for verb in ("ADD", "CHECK", "DEL"):
            call = outcome.of_reference if side == "theirs" else outcome.builtin
            made = call("tuning", verb, pod.path, config)
            files = {item.name: item.read_bytes() for item in directory.glob("*")}
            states.append((everything(pod), made.failed, comparable(made).result, files))
        left.append(states)
    assert left[1] == left[0]


def test_what_is_written_can_be_read() -> None:
    for content in (b"{}", b'{"mac":"02:00:00:00:00:01","promisc":false,"mtu":1500,"allmulti":true,"txQLen":0}'):
        assert tuning_config.decode(tuning_config.encode(tuning_config.decode(content))) == tuning_config.decode(
            content
        )
    with pytest.raises(CniError):
        tuning_config.decode(b'{"mtu": -1}')
