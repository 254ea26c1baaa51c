"""STATUS."""

from __future__ import annotations

import asyncio

import pytest

from multus_daemon import deadlines
from multus_daemon.cni import conf
from multus_daemon.cni.errors import CniError, LimitedConnectivityError, PluginNotAvailableError
from tests.unit.engine.conftest import Engine

STDIN = b'{"cniVersion":"1.1.0","name":"multus"}'


async def test_status_says_which_gate_is_closed(engine: Engine) -> None:
    await engine.verbs.status(STDIN)
    engine.gates.close("manifests", "directory unreadable")
    engine.runner.network_calls.clear()
    with pytest.raises(PluginNotAvailableError, match="manifests: directory unreadable"):
        await engine.verbs.status(STDIN)
    assert engine.runner.network_calls == []


@pytest.mark.conformance("verbs-25")
async def test_the_cluster_network_is_asked_and_no_pod_and_no_other(engine: Engine) -> None:
    engine.overlay["defaultNetworks"] = ["n1"]
    await engine.verbs.status(STDIN)
    assert [(call.verb, call.config.name) for call in engine.runner.network_calls] == [("STATUS", "cluster")]
    assert [method for method, *_ in engine.cluster.calls] == ["network"]


async def test_of_several_delegates_the_first_is_asked(engine: Engine) -> None:
    engine.overlay.clear()
    delegates = b'"delegates":[{"type":"a","name":"one","cniVersion":"1.1.0"},{"type":"b","name":"two"}]'
    await engine.verbs.status(STDIN[:-1] + b"," + delegates + b"}")
    assert [call.config.name for call in engine.runner.network_calls] == ["one"]


async def test_a_path_is_asked_with_its_whole_content(engine: Engine) -> None:
    raw = b'{"name":"cbr0","cniVersion":"1.1.0","plugins":[{"type":"flannel","x":1},{"type":"portmap"}]}'
    engine.files.paths["/etc/cni/net.d/10.conflist"] = conf.parse(raw)
    engine.overlay["clusterNetwork"] = "/etc/cni/net.d/10.conflist"
    await engine.verbs.status(STDIN)
    assert [call.config.raw for call in engine.runner.network_calls] == [raw]


@pytest.mark.weak_spot(23)
@pytest.mark.parametrize("reference", ["cluster", ""])
async def test_a_cluster_network_that_is_not_there_is_code_50_and_named(engine: Engine, reference: str) -> None:
    engine.cluster.networks.clear()
    engine.overlay["clusterNetwork"] = reference
    words = "^clusterNetwork 'cluster' does not exist" if reference else "^no cluster network: neither clusterNetwork"
    with pytest.raises(PluginNotAvailableError, match=words):
        await engine.verbs.status(STDIN)


@pytest.mark.weak_spot(11)
@pytest.mark.conformance("verbs-28")
@pytest.mark.parametrize("error", [PluginNotAvailableError("no ranges"), LimitedConnectivityError("cut off")])
async def test_what_a_plugin_says_is_passed_on(engine: Engine, error: CniError) -> None:
    engine.runner.fail["STATUS", "cluster"] = error
    with pytest.raises(type(error)) as caught:
        await engine.verbs.status(STDIN)
    assert caught.value is error


async def test_calls_at_the_same_time_share_one_run(engine: Engine) -> None:
    engine.runner.pause = 0.01
    await asyncio.gather(*(engine.verbs.status(STDIN) for _ in range(5)))
    assert len(engine.runner.network_calls) == 1
    await engine.verbs.status(STDIN)
    assert len(engine.runner.network_calls) == 2


@pytest.mark.weak_spot(42)
async def test_a_plugin_that_hangs_is_code_50_in_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "STATUS_PLUGINS_SECONDS", 0.02)
    engine.runner.pause = 30
    async with asyncio.timeout(30):
        results = await asyncio.gather(*(engine.verbs.status(STDIN) for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [PluginNotAvailableError] * 3
    assert str(results[0]).startswith("STATUS of the cluster network did not end within 0.02 s")
    assert len(engine.runner.network_calls) == 1
