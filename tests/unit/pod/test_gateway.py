"""Default routes that a pod asks for (`default-route`): once, after every ADD, and the same everywhere."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.plugins.plugin import Progress
from multus_daemon.plugins.run import ListRunner
from multus_daemon.pod import gateway
from multus_daemon.spec.attachment import Attachment, Sandbox
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import (
    CniError,
    InternalError,
    InvalidNetnsError,
    InvalidNetworkConfigError,
    IoFailureError,
    TryAgainLaterError,
)
from multus_daemon.spec.cni.names import ContainerId, IfName
from multus_daemon.spec.cni.result import Interface, IpConfig, Result, Route
from multus_daemon.spec.nad.selection import DEFAULT_NETWORK_ANNOTATION
from multus_daemon.spec.ports import StatusWriteError
from tests.fakes.namespaces import FakeDefaultRoutes, FakeNamespaces
from tests.fakes.runner import FakePluginRunner
from tests.unit.pod.conftest import NETNS, Engine, definition

CLUSTER = "kube-system/cluster"
POD_ROUTES = (Route("0.0.0.0/0", "10.0.0.1"), Route("10.8.0.0/16", "10.0.0.1"), Route("::/0", "fd00::1"))


def asking(*gateways: str, name: str = "n1", **more: Any) -> str:
    return json.dumps([{"name": name, "default-route": list(gateways), **more}])


def result(ifname: str, *routes: Route) -> Result:
    return Result(
        (Interface(ifname, sandbox=NETNS),),
        (IpConfig("10.1.0.2/24", interface=0), IpConfig("fd01::2/64", interface=0)),
        routes,
    )


@pytest.fixture
def engine(engine: Engine) -> Engine:
    """The cluster network brings a default route of each family, and so does n2."""
    engine.runner.results |= {
        CLUSTER: result("eth0", *POD_ROUTES),
        "web/n1": result("net1"),
        "web/n2": result("net2", Route("0.0.0.0/0"), Route("10.9.0.0/16")),
    }
    return engine


def routes(engine: Engine) -> dict[str, tuple[Route, ...]]:
    """Return the routes in the record, by network."""
    return {item.name: item.result.routes for item in engine.store.records["c1"].attachments if item.result}


def kernel_calls(engine: Engine) -> list[str]:
    return [method for method, *_ in engine.links.calls if method == "move_default_routes"]


# --- what is asked of the kernel -------------------------------------------------------------------------------------


@pytest.mark.conformance("config-24")
@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (None, ()),
        ((), ()),
        (("10.1.0.1",), (Route("0.0.0.0/0", "10.1.0.1"),)),
        (("fd01::1",), (Route("::/0", "fd01::1"),)),
        (("10.1.0.1", "fd01::1"), (Route("0.0.0.0/0", "10.1.0.1"), Route("::/0", "fd01::1"))),
        (
            ("10.1.0.1", "fd01:0::1", "10.1.0.9", "fd01::9", "10.1.0.8"),
            (
                Route("0.0.0.0/0", "10.1.0.1"),
                Route("::/0", "fd01::1"),
                Route("0.0.0.0/0", "10.1.0.9", priority=1),
                Route("::/0", "fd01::9", priority=1025),
                Route("0.0.0.0/0", "10.1.0.8", priority=2),
            ),
        ),
        # Go reads it like this.
        (("::ffff:10.1.0.1",), (Route("0.0.0.0/0", "10.1.0.1"),)),
    ],
)
def test_gateways_become_default_routes_in_their_order(
    asked: tuple[str, ...] | None, wanted: tuple[Route, ...]
) -> None:
    config = conf.parse(b'{"type":"fake","name":"n"}')
    assert gateway.routes_of(Attachment("n", config, IfName("net1"), default_route=asked)) == wanted


@pytest.mark.weak_spot(16)
@pytest.mark.conformance("config-24", "e2e-4")
@pytest.mark.parametrize("networks", ["n1,n2", asking()])
def test_without_a_gateway_nothing_is_touched_or_looked_at(engine: Engine, networks: str) -> None:
    """No key, and an empty list: upstream takes the default routes of every interface for the latter."""
    engine.declare(networks)
    engine.verbs.add(engine.request())
    assert kernel_calls(engine) == []
    assert {verb for verb, _ in engine.runner.order} == {"ADD"}
    assert routes(engine)[CLUSTER] == POD_ROUTES


# --- what is said of it ----------------------------------------------------------------------------------------------


@pytest.mark.weak_spot(16)
@pytest.mark.conformance("config-24")
@pytest.mark.parametrize(
    ("gateways", "cluster", "n1", "n2"),
    [
        (
            ["10.1.0.254"],
            (POD_ROUTES[1], POD_ROUTES[2]),
            (Route("0.0.0.0/0", "10.1.0.254"),),
            (Route("10.9.0.0/16"),),
        ),
        (
            ["fd01::1"],
            (POD_ROUTES[0], POD_ROUTES[1]),
            (Route("::/0", "fd01::1"),),
            (Route("0.0.0.0/0"), Route("10.9.0.0/16")),
        ),
        (
            ["10.1.0.254", "fd01::1"],
            (POD_ROUTES[1],),
            (Route("0.0.0.0/0", "10.1.0.254"), Route("::/0", "fd01::1")),
            (Route("10.9.0.0/16"),),
        ),
    ],
)
def test_every_result_says_what_the_kernel_was_told(
    engine: Engine, gateways: list[str], cluster: Any, n1: Any, n2: Any
) -> None:
    engine.declare(json.dumps([{"name": "n1", "default-route": gateways}, {"name": "n2"}]))
    returned = engine.verbs.add(engine.request())
    assert routes(engine) == {CLUSTER: cluster, "web/n1": n1, "web/n2": n2}
    assert returned == engine.store.records["c1"].attachments[0].result
    assert engine.store.records["c1"].complete
    # The last remembered attachment equals the record; an unchanged attachment is not written again.
    remembered = {item.name: item for item in engine.runner.remembered}
    assert list(remembered.values()) == [
        replace(item, observed=None) for item in engine.store.records["c1"].attachments
    ]
    changed = {CLUSTER, "web/n1"} | ({"web/n2"} if n2 == (Route("10.9.0.0/16"),) else set())
    assert {item.name for item in engine.runner.remembered[3:]} == changed


@pytest.mark.conformance("routes-5", "routes-6")
def test_the_plugins_own_default_routes_on_the_chosen_network_give_way(engine: Engine) -> None:
    table = Route("0.0.0.0/0", "10.1.0.7", table=100)
    duplicates = (Route("0.0.0.0/0", "10.1.0.5"), Route("0.0.0.0/0"), Route("0.0.0.0/0", "10.1.0.5", table=254))
    engine.runner.results["web/n1"] = result("net1", *duplicates, table)
    engine.declare(asking("10.1.0.254", "10.1.0.253"))
    engine.verbs.add(engine.request())
    own = (Route("0.0.0.0/0", "10.1.0.254"), Route("0.0.0.0/0", "10.1.0.253", priority=1))
    assert routes(engine)["web/n1"] == (table, *own), "a route of another table is not one of the main table"


def test_a_repeated_add_returns_what_the_first_one_did(engine: Engine) -> None:
    engine.declare(asking("10.1.0.254"))
    first = engine.verbs.add(engine.request())
    engine.links.namespaces[NETNS] |= {"eth0", "net1"}
    assert engine.verbs.add(engine.request()) == first
    assert len(kernel_calls(engine)) == 1


def test_plugging_a_network_in_later_moves_nothing_again(engine: Engine) -> None:
    engine.declare(asking("10.1.0.254"))
    engine.verbs.add(engine.request())
    engine.verbs.add_network(engine.plug())
    assert len(kernel_calls(engine)) == 1


def test_what_was_plugged_in_before_gives_its_default_route_too(engine: Engine) -> None:
    """An ADD that starts afresh in a namespace into which something has been plugged meanwhile."""
    engine.runner.results["web/hot"] = result("net5", Route("0.0.0.0/0", "10.5.0.1"))
    engine.declare(asking("10.1.0.254"))
    engine.verbs.add_network(engine.plug())
    engine.verbs.add(engine.request())
    assert routes(engine)["web/hot"] == ()
    told = [item.result for item in engine.runner.remembered if item.name == "web/hot"]
    assert told[-1] is not None
    assert told[-1].routes == ()


# --- the annotation of the default network ---------------------------------------------------------------------------


def test_the_pods_own_default_network_may_ask(engine: Engine) -> None:
    engine.cluster.put_network(definition("kube-system", "other"))
    engine.declare("n2", annotations={DEFAULT_NETWORK_ANNOTATION: asking("10.1.0.254", name="other")})
    engine.verbs.add(engine.request())
    assert engine.links.default_routes == {(NETNS, True): [("eth0", Route("0.0.0.0/0", "10.1.0.254"))]}


@pytest.mark.npwg("4.1.2.1.9a")
def test_of_both_annotations_one_element_may_name_gateways(engine: Engine) -> None:
    engine.cluster.put_network(definition("kube-system", "other"))
    chosen = {DEFAULT_NETWORK_ANNOTATION: asking("10.1.0.254", name="other")}
    engine.declare(asking("fd01::1"), annotations=chosen)
    with pytest.raises(
        InvalidNetworkConfigError,
        match=r"^default-route is set twice: for network kube-system/other and for network web/n1 .pod web/p1",
    ):
        engine.verbs.add(engine.request())
    assert engine.runner.calls == []
    engine.declare(asking(), annotations=chosen)
    engine.verbs.add(engine.request())


# --- failures --------------------------------------------------------------------------------------------------------


def undone(engine: Engine) -> bool:
    return not engine.runner.attached and not engine.store.records and "web/p1" not in engine.cluster.statuses


@pytest.mark.weak_spot(7, 54)
@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (OSError(errno.ENETUNREACH, "default route via 10.1.9.9"), InvalidNetworkConfigError, "default route"),
        (OSError(errno.EHOSTUNREACH, "no route to host"), InvalidNetworkConfigError, "no route to host"),
        (OSError(errno.ENODEV, "No such device"), InternalError, "No such device"),
    ],
)
def test_a_gateway_that_the_kernel_refuses_undoes_everything(
    engine: Engine, error: OSError, kind: type[CniError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.declare(asking("10.1.9.9"))

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(FakeDefaultRoutes, "replace", refuse)
    with pytest.raises(kind, match=f"^{words}.*pod web/p1") as caught:
        engine.verbs.add(engine.request())
    assert "network web/n1, interface \"net1\", default-route ['10.1.9.9']" in caught.value.details
    assert ("a gateway must be a neighbour" in caught.value.details) is (kind is InvalidNetworkConfigError)
    assert engine.runner.order[2:] == [("DEL", "web/n1"), ("DEL", CLUSTER)]
    assert undone(engine)
    assert [reason for reason, _ in engine.warnings] == ["FailedAddingInterface"]


def test_a_namespace_that_has_gone_meanwhile_is_named(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.declare(asking("10.1.0.254"))
    add = engine.runner.add

    def vanishing(
        sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None
    ) -> Result:
        if attachment.name == "web/n1":
            engine.links.namespaces.clear()
        return add(sandbox, attachment, netns)

    monkeypatch.setattr(engine.runner, "add", vanishing)
    with pytest.raises(InvalidNetnsError, match=f"^{NETNS} can't be entered: No such file"):
        engine.verbs.add(engine.request())
    assert undone(engine)


@pytest.mark.weak_spot(7)
@pytest.mark.parametrize("built_in", [False, True])
def test_a_result_that_can_not_be_remembered_undoes_everything(engine: Engine, built_in: bool) -> None:
    engine.declare(asking("10.1.0.254"))
    engine.runner.built_in |= {CLUSTER, "web/n1"} if built_in else set()
    engine.runner.fail["REMEMBER", "web/n1"] = IoFailureError("the result could not be stored")
    with pytest.raises(IoFailureError, match=r"^the result could not be stored .pod web/p1"):
        engine.verbs.add(engine.request())
    assert undone(engine)


def test_what_stays_after_a_failure_is_on_record_as_the_kernel_has_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.runner.results["web/hot"] = result("net5", Route("0.0.0.0/0", "10.5.0.1"))
    engine.declare(asking("10.1.0.254"))
    engine.verbs.add_network(engine.plug())
    verbs = engine.make_verbs("required")

    def refuse(*_: object, **__: object) -> None:
        raise StatusWriteError("forbidden")

    monkeypatch.setattr(engine.cluster, "write_network_status", refuse)
    with pytest.raises(TryAgainLaterError):
        verbs.add(engine.request())
    assert routes(engine) == {"web/hot": ()}


# --- libcni's cache --------------------------------------------------------------------------------------------------


@pytest.mark.weak_spot(17)
@pytest.mark.conformance("routes-3", "routes-4", "routes-5", "routes-7")
@pytest.mark.parametrize("version", ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"])
@pytest.mark.parametrize("ipv4", [True, False])
@pytest.mark.parametrize("others", [True, False])
def test_the_cached_results_of_every_version_say_the_same(
    tmp_path: Path, version: str, ipv4: bool, others: bool
) -> None:
    """`::/0` as plugins write it, other routes kept, `routes` gone where it was the only one."""
    old = {"4": ("0.0.0.0/0", "10.1.0.1", "10.8.0.0/16"), "6": ("::/0", "fd01::1", "fd08::/32")}
    cache = ResultCache(tmp_path)
    runner = ListRunner(FakePluginRunner().as_plugins, cache, "/a")
    kept = [Route(other) for _, _, other in old.values()] if others else []
    before = result("eth0", *(Route(dst, gw) for dst, gw, _ in old.values()), *kept)
    config = {"cniVersion": version, "type": "fake"}
    attachments = tuple(
        Attachment(
            name,
            conf.parse(json.dumps({**config, "name": name}).encode()),
            IfName(ifname),
            result=before if name == "a" else result(ifname),
            default_route=asked,
        )
        for name, ifname, asked in (("a", "eth0", None), ("b", "net1", ("10.1.0.9" if ipv4 else "fd01::9",)))
    )
    sandbox = Sandbox(ContainerId("c1"), NETNS)
    move = gateway.move(FakeNamespaces({NETNS: []}).open(NETNS), "web/p1", attachments[1])
    for attachment in attachments:
        runner.remember(sandbox, move.done(attachment))
    cached = {
        name: cache.read_result(name, "c1", ifname, version) for name, ifname in (("a", "eth0"), ("b", "net1"))
    }  # fmt: skip
    gone, stays = ("4", "6") if ipv4 else ("6", "4")
    left = {Route(old[stays][0], old[stays][1]), *kept}
    assert cached["a"] is not None
    assert set(cached["a"].routes) == left
    assert cached["b"] is not None
    assert cached["b"].routes == (Route(old[gone][0], "10.1.0.9" if ipv4 else "fd01::9"),)
    assert [ip.address for ip in cached["a"].ips] == [ip.address for ip in before.ips]
    [entry] = [entry for entry in cache.entries("c1") if entry.network == "a"]
    assert entry.result is not None
    assert entry.result["cniVersion"] == version
    if version in ("0.1.0", "0.2.0"):
        assert ("routes" in entry.result[f"ip{gone}"]) is others


# --- an ADD for a container that has hot-plugged networks -------------------------------------------------------------


@pytest.mark.parametrize("is_undone", [True, False])
def test_hot_plugged_networks_get_the_routes_back_that_an_undone_add_has_moved(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_undone: bool
) -> None:
    own = Route("0.0.0.0/0", "10.5.0.1")
    engine.runner.results["web/hot"] = result("net5", own)
    engine.verbs.add_network(engine.plug())
    engine.links.default_routes[NETNS, True] = [(IfName("net5"), own)]
    engine.links.namespaces[NETNS].add("net5")
    engine.declare(asking("10.1.0.254"))
    if is_undone:

        def forbid(pod: object, value: str, *, keep_trying: bool) -> None:
            raise StatusWriteError("forbidden")

        monkeypatch.setattr(engine.cluster, "write_network_status", forbid)
        engine.verbs = engine.make_verbs("required")
        with pytest.raises(TryAgainLaterError):
            engine.verbs.add(engine.request())
    else:
        engine.verbs.add(engine.request())
    [hot] = [item for item in engine.store.records["c1"].attachments if item.name == "web/hot"]
    assert hot.result is not None
    assert hot.result.routes == ((own,) if is_undone else ())
    assert hot.replaced_routes == (() if is_undone else (own,))
    [remembered] = [item for item in engine.runner.remembered if item.name == "web/hot"][-1:]
    assert remembered.result == hot.result
    assert (IfName("net5"), own) in engine.links.default_routes[NETNS, True] or not is_undone
