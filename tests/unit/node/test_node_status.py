"""STATUS."""

from __future__ import annotations

import pytest

from multus_daemon import deadlines
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import CniError, LimitedConnectivityError, PluginNotAvailableError
from tests.unit.pod.conftest import Engine

STDIN = b'{"cniVersion":"1.1.0","name":"multus"}'


def test_status_says_which_gate_is_closed(engine: Engine) -> None:
    engine.verbs.status(STDIN)
    engine.gates.close("manifests", "directory unreadable")
    engine.runner.network_calls.clear()
    with pytest.raises(PluginNotAvailableError, match="manifests: directory unreadable"):
        engine.verbs.status(STDIN)
    assert engine.runner.network_calls == []


@pytest.mark.conformance("verbs-25")
def test_the_cluster_network_is_asked_and_no_pod_and_no_other(engine: Engine) -> None:
    engine.overlay["defaultNetworks"] = ["n1"]
    engine.verbs.status(STDIN)
    assert [(call.verb, call.config.name) for call in engine.runner.network_calls] == [("STATUS", "cluster")]
    assert [method for method, *_ in engine.cluster.calls] == ["network"]


def test_of_several_delegates_the_first_is_asked(engine: Engine) -> None:
    engine.overlay.clear()
    delegates = b'"delegates":[{"type":"a","name":"one","cniVersion":"1.1.0"},{"type":"b","name":"two"}]'
    engine.verbs.status(STDIN[:-1] + b"," + delegates + b"}")
    assert [call.config.name for call in engine.runner.network_calls] == ["one"]


def test_a_path_is_asked_with_its_whole_content(engine: Engine) -> None:
    raw = b'{"name":"cbr0","cniVersion":"1.1.0","plugins":[{"type":"flannel","x":1},{"type":"portmap"}]}'
    engine.files.paths["/etc/cni/net.d/10.conflist"] = conf.parse(raw)
    engine.overlay["clusterNetwork"] = "/etc/cni/net.d/10.conflist"
    engine.verbs.status(STDIN)
    assert [call.config.raw for call in engine.runner.network_calls] == [raw]


@pytest.mark.weak_spot(23)
@pytest.mark.parametrize("reference", ["cluster", ""])
def test_a_cluster_network_that_is_not_there_is_code_50_and_named(engine: Engine, reference: str) -> None:
    engine.cluster.networks.clear()
    engine.overlay["clusterNetwork"] = reference
    words = "^clusterNetwork 'cluster' does not exist" if reference else "^no cluster network: neither clusterNetwork"
    with pytest.raises(PluginNotAvailableError, match=words):
        engine.verbs.status(STDIN)


@pytest.mark.weak_spot(11)
@pytest.mark.conformance("verbs-28")
@pytest.mark.parametrize("error", [PluginNotAvailableError("no ranges"), LimitedConnectivityError("cut off")])
def test_what_a_plugin_says_is_passed_on(engine: Engine, error: CniError) -> None:
    engine.runner.fail["STATUS", "cluster"] = error
    with pytest.raises(type(error)) as caught:
        engine.verbs.status(STDIN)
    assert caught.value is error


@pytest.mark.weak_spot(42)
def test_a_plugin_that_hangs_is_code_50_in_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "STATUS_PLUGINS_SECONDS", 0.02)
    engine.runner.pause = 30
    with pytest.raises(PluginNotAvailableError, match=r"^STATUS of the cluster network did not end within 0\.02 s"):
        engine.verbs.status(STDIN)
    assert len(engine.runner.network_calls) == 1
